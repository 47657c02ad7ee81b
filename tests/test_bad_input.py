"""What bad input gets: a message that says what was expected, what was found, where, and what to do."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import (
    BadCall,
    BadIds,
    BadMemory,
    BadQuery,
    DamagedMemory,
    EmptyMemory,
    MemoryExists,
    ModelMismatch,
    NewerFormat,
    NotKept,
)
from dualform.memory.files import seal
from small import batch, network, run


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[nn.Module, dualform.Memory]:
    return run(tmp_path / "run", examples={"label": torch.arange(20) % 4, "name": [f"n{i % 3}" for i in range(20)]})


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def says(*parts: str) -> str:
    """A pattern for a message that holds all these parts in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0.5, 1.5]), says("whole numbers", "float32", ".long()")),
        (torch.tensor([True, False]), says("whole numbers", "bool")),
        (torch.tensor([0, -3]), says("0 or larger", "-3")),
        ([0, 20], says("example id 20", "outside the examples table", "20 entries", "Give every column")),
    ],
)
def test_ids_that_cannot_be_right(tmp_path: Path, ids: object, message: str) -> None:
    model = network()
    recorder = dualform.record(model, sgd(model), tmp_path / "run", examples={"label": torch.arange(20)})
    with recorder, pytest.raises(BadIds, match=message), recorder.batch(ids):
        pass


def test_ids_that_fit_no_layer(tmp_path: Path) -> None:
    model = network()
    with (
        dualform.record(model, sgd(model), tmp_path / "run") as recorder,
        pytest.raises(BadIds, match=says("ids of shape [3]", "fit no recorded layer", "[5]", "one id per row")),
        recorder.batch([1, 2, 3]),
    ):
        model(batch(1)[1]).sum().backward()


def test_ids_that_fit_only_some_layers_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.Linear(6, 6, dtype=torch.float64)
            self.pooled = nn.Linear(6, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pooled(self.each(x).mean(0, keepdim=True))

    model = Pooled()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        ids, x, _ = batch(1)
        with recorder.batch(ids):
            model(x).sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    assert next(memory.blocks(0, 1)).examples.equal(ids)
    assert next(memory.blocks(1, 1)).examples.tolist() == [-1]
    assert "pooled: ids of shape [5] fit no dimension of its input [1]" in caplog.text
    assert "pooled: ids of shape [5]" in repr(memory)


@pytest.mark.parametrize(
    ("ids", "leading", "dim", "examples", "positions"),
    [
        ([[1, 2], [3, 4]], (2, 2), 0, [1, 2, 3, 4], [0, 0, 0, 0]),
        ([1, 2, 3, 4], (2, 2), 0, [1, 2, 3, 4], [0, 0, 0, 0]),
        ([7, 8], (2, 3), 0, [7, 7, 7, 8, 8, 8], [0, 1, 2, 0, 1, 2]),
        ([7, 8, 9], (2, 3), 1, [7, 8, 9, 7, 8, 9], [0, 0, 0, 1, 1, 1]),
        ([7, 8], (2, 2, 2), 0, [7] * 4 + [8] * 4, [0, 1, 2, 3] * 2),
        ([7, 8], (2, 2, 2), 1, [7, 7, 8, 8] * 2, [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_ids_are_spread_over_leading_dimensions(
    tmp_path: Path, ids: list[int], leading: tuple[int, ...], dim: int, examples: list[int], positions: list[int]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        with recorder.batch(ids, dim=dim):
            model(torch.randn(*leading, 3)).sum().backward()
        optimizer.step()
    block = next(dualform.open(tmp_path / "run").blocks(0, 1))
    assert block.examples.tolist() == examples
    assert block.positions.tolist() == positions


def test_calls_to_record_that_cannot_be_right(tmp_path: Path) -> None:
    model = network()
    good = sgd(model)
    with pytest.raises(BadCall, match=says("optimizer must be a torch optimiser")):
        dualform.record(model, [], tmp_path)
    with pytest.raises(BadCall, match=says("keep must be one of 'all', 'keys', not 'some'")):
        dualform.record(model, good, tmp_path, keep="some")
    with pytest.raises(BadCall, match=says("on_error must be 'tell' or 'raise'")):
        dualform.record(model, good, tmp_path, on_error="ignore")
    with pytest.raises(BadCall, match=says("lengths differ", "'a': 2", "'b': 3")):
        dualform.record(model, good, tmp_path, examples={"a": [1, 2], "b": [1, 2, 3]})
    with pytest.raises(BadCall, match=says("a column cannot be called 'step'")):
        dualform.record(model, good, tmp_path, examples={"step": [1, 2]})
    with pytest.raises(BadCall, match=says("column 'a' must be an array of numbers or texts")):
        dualform.record(model, good, tmp_path, examples={"a": 3})
    with pytest.raises(BadCall, match=says("no layer to record", "layers='fc*'")):
        dualform.record(model, good, tmp_path, layers="fc*")
    convolution = nn.Conv2d(1, 1, 1)
    with pytest.raises(BadCall, match=says("no layer to record", "no nn.Linear")):
        dualform.record(convolution, sgd(convolution), tmp_path)
    with pytest.raises(BadCall, match=says("lazy layer", "run one forward pass before record()")):
        dualform.record(nn.Sequential(nn.LazyLinear(3)), good, tmp_path)


def test_a_model_that_is_no_module(recorded: tuple[nn.Module, dualform.Memory]) -> None:
    # In another process: here the run-time type checks of the tests would answer first.
    script = f"""
import torch, dualform
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
memory = dualform.open({str(recorded[1].path)!r})
for ask in (lambda: dualform.record("model", optimizer, "x"), lambda: memory.attend("model", torch.ones(1))):
    try:
        ask()
    except dualform.errors.BadCall as error:
        print(error)
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "model must be a torch.nn.Module, not str" in output
    assert "attend takes a torch.nn.Module and its inputs, not str" in output


def test_a_directory_that_holds_something(tmp_path: Path) -> None:
    model = network()
    run(tmp_path / "run", network())
    with pytest.raises(MemoryExists, match=says("already holds a memory", "resume_at", "choose another directory")):
        dualform.record(model, sgd(model), tmp_path / "run").start()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(MemoryExists, match=says("not empty", "'thesis.tex'", "new or empty")):
        dualform.record(model, sgd(model), tmp_path / "mine").start()
    (tmp_path / "file").touch()
    with pytest.raises(MemoryExists, match=says("is a file")):
        dualform.record(model, sgd(model), tmp_path / "file").start()


def test_a_directory_where_nothing_was_committed_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    (tmp_path / "initial.safetensors.tmp").touch()
    with pytest.raises(EmptyMemory, match=says("holds no memory", "nothing was ever committed")):
        dualform.open(tmp_path)
    assert run(tmp_path)[1].certificate().exact


def test_opening_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadMemory, match=says("there is no directory", "nowhere", "record()")):
        dualform.open(tmp_path / "nowhere")
    with pytest.raises(EmptyMemory, match=says("nothing was ever committed")):
        dualform.open(tmp_path)


def test_questions_on_an_empty_memory(tmp_path: Path) -> None:
    model = network()
    with dualform.record(model, sgd(model), tmp_path / "run"):
        while_recording = dualform.open(tmp_path / "run")
    for memory in (while_recording, dualform.open(tmp_path / "run")):
        assert memory.steps == 0
        for ask in (
            memory.certificate,
            lambda memory=memory: memory.attend(model, batch(1)[1]),
            lambda memory=memory: memory.compact("0"),
        ):
            with pytest.raises(EmptyMemory, match=says("holds no step yet", "nothing was committed after step 0")):
                ask()


def test_a_model_that_is_not_the_memorys(recorded: tuple[nn.Module, dualform.Memory]) -> None:
    model, memory = recorded
    x = batch(1)[1]
    with pytest.raises(ModelMismatch, match=says("0.weight differs from its last recorded step 6", "check=False")):
        memory.attend(network(seed=1), x)
    with pytest.raises(ModelMismatch, match=says("0.weight should have shape [8, 6]", "found shape [8, 5]")):
        memory.attend(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)), x)
    with pytest.raises(ModelMismatch, match=says("0.weight should have shape [8, 6]", "found nothing")):
        memory.dual(nn.Sequential(nn.ReLU()))
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
    with pytest.raises(ModelMismatch, match=says("0.weight differs")):
        memory.attend(model, x)
    assert len(memory.attend(model, x, check=False)) == 2


def test_questions_that_cannot_be_right(recorded: tuple[nn.Module, dualform.Memory]) -> None:
    model, memory = recorded
    x = batch(1)[1]
    spotlight = memory.attend(model, x)
    attention = spotlight["0"]
    cases = [
        (BadQuery, lambda: spotlight["3"], says("'3' is not recorded", "recorded layers: 0, 2")),
        (BadQuery, lambda: attention.top(0), says("k must be a whole number of at least 1, not 0")),
        (BadQuery, lambda: attention.top(2, order="best"), says("order must be one of 'largest'", "'best'")),
        (BadQuery, lambda: attention.top(2, by="colour"), says("no column 'colour'", "label, name", "annotate")),
        (BadQuery, lambda: attention.top(2, by="label", within="label"), says("by or within, not both")),
        (BadQuery, lambda: attention.top(2, absolute=True), says("needs by", "order='absolute'")),
        (BadQuery, lambda: attention.where(name="zzz").top(1), says("'name' has no value 'zzz'", "'n0'")),
        (BadQuery, lambda: attention.where(label="three"), says("'label' holds numbers", "does not fit")),
        (BadQuery, lambda: attention.where(example=[True, False]), says("boolean array", "20 examples", "[2]")),
        (BadQuery, lambda: attention.contributions(unit=8), says("unit must be", "0 to 7", "8")),
        (BadQuery, lambda: attention.contributions(direction=[1.0]), says("direction must have shape [8]", "[1]")),
        (BadQuery, lambda: attention.contributions(unit=1, direction=[1.0]), says("not both")),
        (BadQuery, lambda: memory.attend(None, {"0": torch.randn(3, 5)}), says("width 6", "not 5")),
        (BadQuery, lambda: memory.dual(model, kernel="cosine")(x), says("kernel must be 'softmax'", "'cosine'")),
        (BadCall, lambda: memory.attend(None, torch.randn(3, 5)), says("dict from layer names")),
        (BadCall, lambda: memory.attend(model, x, until=7), says("until must be a step from 0 to 6", "7")),
        (BadCall, lambda: memory.weights(until=-1), says("until must be a step from 0 to 6", "-1")),
        (BadCall, lambda: memory.attend(model, x, batch_size=0), says("batch_size must be")),
        (BadCall, lambda: memory.compact("0", 9), says("rank must be", "1 to 6", "9")),
        (BadCall, lambda: memory.annotate(size=[1, 2]), says("'size' has 2 entries", "example", "every example id")),
    ]
    for kind, ask, message in cases:
        with pytest.raises(kind, match=message):
            ask()


def test_a_level_that_cannot_answer_names_the_one_that_can(tmp_path: Path) -> None:
    model, memory = run(tmp_path / "run", keep="keys")
    attention = memory.attend(model, batch(1)[1])["0"]
    assert attention.top(3).scores.shape == (5, 3)
    for ask in (attention.output, attention.initial, attention.contributions, memory.weights):
        with pytest.raises(NotKept, match=says("needs the gradients of 0.weight", "keep='keys'", "keep='all'")):
            ask()
    assert all(row.residual is None and "keep='keys'" in row.reason for row in memory.certificate())


def test_nan_keys_are_recorded_counted_told_and_set_apart(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        x = torch.randn(6, 3)
        x[2, 1] = float("nan")
        x[4, 0] = float("inf")
        with recorder.batch(torch.arange(6)):
            model(x).sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    assert memory.manifest.nonfinite == 2
    assert "2 events hold NaN or infinity" in repr(memory)
    (row,) = memory.certificate()
    assert not row.exact
    assert "NaN or infinity" in row.reason
    top = memory.attend(None, {"": torch.tensor([[0.0, 1.0, 1.0]])})[""].top(6)
    assert 2 not in top.events[0].tolist()
    assert "NaN scores set apart" in top.explain()


def damaged(recorded: tuple[nn.Module, dualform.Memory], file: str) -> Path:
    return recorded[1].path / file


SEGMENT = "segments/r000-000000.safetensors"


@pytest.mark.parametrize("file", [SEGMENT, "initial.safetensors", "final.safetensors"])
def test_a_truncated_file(recorded: tuple[nn.Module, dualform.Memory], file: str) -> None:
    path = damaged(recorded, file)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DamagedMemory, match=says(file, "truncated or was edited", "bytes and has")):
        dualform.open(recorded[1].path)


@pytest.mark.parametrize("file", [SEGMENT, "initial.safetensors", "final.safetensors"])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.99])
def test_an_edited_file(recorded: tuple[nn.Module, dualform.Memory], file: str, where: float) -> None:
    path = damaged(recorded, file)
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedMemory, match=says(file, "is damaged")):
        dualform.open(recorded[1].path).certificate()
    assert not dualform.memory.verify(recorded[1].path).ok


def test_a_missing_file(recorded: tuple[nn.Module, dualform.Memory]) -> None:
    damaged(recorded, SEGMENT).unlink()
    with pytest.raises(DamagedMemory, match=says(SEGMENT, "is missing")):
        dualform.open(recorded[1].path)


@pytest.mark.parametrize("where", [1, 100, 900])
def test_an_edited_manifest(recorded: tuple[nn.Module, dualform.Memory], where: int) -> None:
    path = damaged(recorded, "manifest-r000.json")
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises((DamagedMemory, NewerFormat), match=says("manifest-r000.json")):
        dualform.open(recorded[1].path)


def test_an_edited_column(recorded: tuple[nn.Module, dualform.Memory]) -> None:
    path = damaged(recorded, "examples/label.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    memory = dualform.open(recorded[1].path)
    with pytest.raises(DamagedMemory, match=says("label.safetensors", "is damaged")):
        memory.attend(recorded[0], batch(1)[1])["0"].totals(by="label")
    assert any("label.safetensors" in problem for problem in memory.verify().problems)


def rewrite(path: Path, **changes: object) -> None:
    """Change a manifest and seal it again, as an attacker would."""
    manifest = path / "manifest-r000.json"
    body = json.loads(manifest.read_text()) | {"checksum": "0" * 16} | changes
    manifest.write_bytes(seal(json.dumps(body, separators=(",", ":")).encode()))


def test_a_newer_format(recorded: tuple[nn.Module, dualform.Memory]) -> None:
    rewrite(recorded[1].path, format=99)
    with pytest.raises(NewerFormat, match=says("has format 99", "up to 2", "Upgrade dualform")):
        dualform.open(recorded[1].path)


@pytest.mark.parametrize("file", ["/etc/passwd", "../secret.safetensors", "segments/../../x.safetensors"])
def test_a_manifest_that_points_outside(recorded: tuple[nn.Module, dualform.Memory], file: str) -> None:
    body = json.loads((recorded[1].path / "manifest-r000.json").read_text())
    rewrite(recorded[1].path, initial=body["initial"] | {"file": file})
    with pytest.raises(DamagedMemory, match=says("names a file", file, "not opened")):
        dualform.open(recorded[1].path)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": "six"}, {"weights": 3}, {"surprise": 1}, {"segments": [{}]}, {"steps": 99}, {"segments": []},
        {"weights": []}, {"parameters": []}, {"optimizers": []},
    ],
)  # fmt: skip
def test_a_manifest_of_the_wrong_shape(recorded: tuple[nn.Module, dualform.Memory], changes: dict[str, object]) -> None:
    rewrite(recorded[1].path, **changes)
    with pytest.raises(DamagedMemory, match="is damaged|contradicts itself"):
        dualform.open(recorded[1].path)


def test_verify_names_all_damage_at_once(recorded: tuple[nn.Module, dualform.Memory], tmp_path: Path) -> None:
    shutil.copytree(recorded[1].path, tmp_path / "copy")
    assert dualform.memory.verify(tmp_path / "copy").ok
    for file in (SEGMENT, "initial.safetensors"):
        content = bytearray((tmp_path / "copy" / file).read_bytes())
        content[-3] ^= 4
        (tmp_path / "copy" / file).write_bytes(content)
    (tmp_path / "copy" / "final.safetensors").unlink()
    result = dualform.memory.verify(tmp_path / "copy")
    assert not result.ok
    assert len(result.problems) == 3
    for problem, file in zip(result.problems, ["initial", "r000-000000", "final"], strict=True):
        assert file in problem
