"""Going on with a run: from any step of it, with the model of that step, and with nothing lost where that fails."""

import copy
import math
import shutil
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import BadCall, BadIds, BadMemory, MemoryExists, ModelMismatch
from dualform.memory.lock import Lock
from faults import (
    COLUMNS,
    STEPS,
    Fault,
    batch,
    contents,
    differences,
    distance,
    faulty,
    files,
    fresh,
    hooks_of,
    loaded,
    system_error,
    trained,
)

Run = tuple[nn.Sequential, torch.optim.SGD]


def record(
    path: Path,
    run: Run | None = None,
    since: int = 0,
    until: int = STEPS,
    commits: Collection[int] = (),
    **options: Any,
) -> dualform.Memory:
    """Record some steps of the run; from `since` on it is resumed unless `resume_at` says otherwise."""
    run = loaded(since) if run is None else run
    options.setdefault("resume_at", since or None)
    with dualform.record(*run, path, on_error="raise", **options) as recorder:
        list(trained(*run, recorder, since, until, commits))
    return dualform.open(path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run with commits after steps 2, 5 and 6."""
    path = tmp_path_factory.mktemp("original") / "run"
    record(path, commits=(2, 5), examples=COLUMNS)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("since", range(STEPS + 1))
def test_a_closed_run_is_gone_on_with_from_any_step(original: Path, path: Path, since: int) -> None:
    memory = record(path, since=since, resume_at=since, commits=(4,))
    assert differences(memory, contents(dualform.open(original))) == []
    assert memory.certificate().exact
    assert memory.manifest.id == dualform.open(original).manifest.id
    for step in range(STEPS + 1):
        assert distance(memory.weights(until=step), step) < 1e-12


@pytest.mark.parametrize("since", range(STEPS))
def test_a_run_that_was_not_closed_is_gone_on_with_from_any_step(original: Path, tmp_path: Path, since: int) -> None:
    run = loaded(0)
    with dualform.record(*run, tmp_path / "open", examples=COLUMNS) as recorder:
        list(trained(*run, recorder, commits=(2, 5)))
        shutil.copytree(tmp_path / "open", tmp_path / "run")
    memory = record(tmp_path / "run", since=since, resume_at=since)
    assert differences(memory, contents(dualform.open(original))) == []


def test_a_run_is_gone_on_with_again_and_again(original: Path, path: Path) -> None:
    for since in (5, 3, 3, 4, 1, 0, 6, 2):
        memory = record(path, since=since, resume_at=since, commits=(1, 4))
        assert memory.certificate().exact
    assert differences(memory, contents(dualform.open(original))) == []
    assert memory.verify().ok
    named = {record.file for record in memory.manifest.files}
    assert {name for name in files(path) if "segments" in name} <= named


def test_a_longer_and_a_shorter_run_may_follow(path: Path) -> None:
    assert record(path, since=4, until=5).steps == 5
    memory = record(path, since=3, until=12)
    assert memory.steps == 12
    assert memory.certificate().exact
    assert distance(memory.weights(), 12) < 1e-12


def test_steps_and_events_are_numbered_without_a_gap(path: Path) -> None:
    run = loaded(3)
    with dualform.record(*run, path, resume_at=3, on_error="raise") as recorder:
        assert "3 steps so far" in repr(recorder)
        assert dualform.open(path).steps == 3
        list(trained(*run, recorder, since=3, until=4))
        assert "4 steps so far" in repr(recorder)
        recorder.commit()
        assert dualform.open(path).steps == 4
    memory = dualform.open(path)
    for weight in range(2):
        blocks = list(memory.blocks(weight, 4))
        assert torch.cat([block.events for block in blocks]).tolist() == list(range(20))
        assert torch.cat([block.steps for block in blocks]).tolist() == [
            step for step in (1, 2, 3, 4) for _ in range(5)
        ]
        assert torch.cat([block.backwards for block in blocks]).unique().tolist() == [0, 1, 2, 3]
    assert memory.journal.flags.shape[0] == 4


def test_repeated_keys_are_not_stored_again(path: Path) -> None:
    seen = {int(i) for step in (1, 2, 3, 4) for i in batch(step)[0]}
    memory = record(path, since=4)
    last = memory.manifest.segments[-1]
    new = {int(i) for step in (5, 6) for i in batch(step)[0]} - seen
    assert last.events[0] == 10
    assert last.keys[0] == len(new)
    file = memory._segments[-1]
    assert file.read("w0/numbers").min() < last.first_keys[0]
    *_, block = memory.blocks(0, 6)
    assert block.keys.equal(torch.cat([batch(step)[1] for step in (5, 6)]))


def test_an_empty_directory_is_begun_at_step_0(tmp_path: Path) -> None:
    memory = record(tmp_path / "new", resume_at=0)
    assert memory.steps == STEPS
    (tmp_path / "empty").mkdir()
    assert record(tmp_path / "empty", resume_at=0).certificate().exact


@pytest.mark.parametrize("there", ["nothing", "an empty directory", "a run that never began"])
def test_without_a_memory_there_is_nothing_to_go_on_with(tmp_path: Path, there: str) -> None:
    if there == "an empty directory":
        (tmp_path / "run").mkdir()
    if there == "a run that never began":
        with faulty(Fault(20, system_error(28))), pytest.raises(BadMemory, match="No space"):
            dualform.record(*loaded(0), tmp_path / "run").start()
    run = loaded(3)
    with pytest.raises(BadMemory, match="nothing was ever committed|no directory"):
        dualform.record(*run, tmp_path / "run", resume_at=3).start()
    assert hooks_of(*run) == 0
    assert record(tmp_path / "run").certificate().exact  # and recording may begin there


def test_something_that_is_no_memory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MemoryExists, match="is not empty .*notes.txt"):
        dualform.record(*loaded(3), tmp_path, resume_at=3).start()
    assert [item.name for item in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("value", [-1, 1.0, "3", True, math.nan, [3], np.float64(3)])
def test_resume_at_must_be_the_number_of_a_step(path: Path, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # or the types would answer first
    with pytest.raises(BadCall, match="resume_at must be the number of a step"):
        dualform.record(*loaded(3), path, resume_at=value)


def test_a_step_beyond_the_last_commit_is_refused(path: Path) -> None:
    refused(path, loaded(6), BadCall, "resume_at=7 is beyond the last committed step, 6.*recorder.commit", resume_at=7)


def refused(path: Path, run: Run, error: type[Exception], match: str, **options: Any) -> None:
    """It cannot be gone on with, and everything is as it was."""
    before = files(path)
    state = copy.deepcopy(run[0].state_dict())
    with pytest.raises(error, match=f"(?s){match}"):
        dualform.record(*run, path, **options).start()
    assert files(path) == before
    assert hooks_of(*run) == 0
    assert all(state[name].equal(tensor) for name, tensor in run[0].state_dict().items())
    Lock(path).release()  # which is free


def nudged(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0].add_(1e-4)


@pytest.mark.parametrize("since", [2, 3])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_other_weights_are_refused_at_a_commit_and_inside_a_segment(path: Path, since: int, name: str) -> None:
    run = loaded(since)
    nudged(run[0], name)
    refused(path, run, ModelMismatch, f"{name} is not what it was after step {since}.*resume_at", resume_at=since)


@pytest.mark.parametrize("since", range(STEPS + 1))
def test_the_checkpoint_of_another_step_is_refused(path: Path, since: int) -> None:
    for other in {0, since - 1, since + 1, STEPS} - {-1, STEPS + 1, since}:
        refused(path, loaded(other), ModelMismatch, f"is not what it was after step {since} ", resume_at=since)


@pytest.mark.parametrize("since", [2, 3])
def test_other_momentum_is_refused_at_a_commit_and_inside_a_segment(path: Path, since: int) -> None:
    run = loaded(since)
    run[1].load_state_dict(loaded(since + 1)[1].state_dict())
    message = f"momentum of 0.weight is not what it was after step {since} .*same checkpoint"
    refused(path, run, ModelMismatch, message, resume_at=since)


@pytest.mark.parametrize("since", [0, 2, 3])
def test_a_fresh_optimiser_begins_without_momentum_and_is_exact(path: Path, since: int) -> None:
    model, _ = loaded(since)
    memory = record(path, (model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)), since, resume_at=since)
    assert memory.steps == STEPS
    assert memory.certificate().exact
    for name, tensor in memory.weights().items():
        assert (tensor - model.state_dict()[name]).abs().max() < 1e-12


def test_another_learning_rate_is_no_other_run(path: Path) -> None:
    model, optimizer = loaded(3)
    optimizer.param_groups[0].update(lr=0.01, momentum=0.5, weight_decay=0.1)
    memory = record(path, (model, optimizer), 3)
    assert memory.journal.settings[:, 0, 0].tolist() == [0.1] * 3 + [0.01] * 3
    assert memory.certificate().exact


class Deeper(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*fresh()[0], nn.Linear(4, 4, dtype=torch.float64))


def other(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, an optimiser and options that are not those of the run."""
    model, optimizer = loaded(2)
    if kind == "architecture":
        deeper = Deeper()
        return deeper, torch.optim.SGD(deeper.parameters(), lr=0.1, momentum=0.9), {}
    if kind == "width":
        wide = nn.Sequential(nn.Linear(6, 9).double(), nn.ReLU(), nn.Linear(9, 4).double())
        return wide, torch.optim.SGD(wide.parameters(), lr=0.1), {}
    if kind == "dtype":
        return model.float(), torch.optim.SGD(model.parameters(), lr=0.1), {}
    if kind == "optimiser":
        return model, torch.optim.Adam(model.parameters()), {}
    if kind == "buffer":
        model.register_buffer("count", torch.zeros(1))
        return model, optimizer, {}
    return model, optimizer, {"layers": {"layers": "2"}, "keep": {"keep": "keys"}}[kind]


@pytest.mark.parametrize(
    "kind, says",
    [
        ("architecture", "parameters.*3.weight"),
        ("width", r"parameters.*\(8, 6\).*\(9, 6\)"),
        ("dtype", "parameters.*float64.*float32"),
        ("optimiser", "optimizers.*SGD.*Adam"),
        ("buffer", "every step.*count"),
        ("layers", "parameters.*0.weight.*2.weight"),
        ("keep", "keep.*'all'.*'keys'"),
    ],
)
def test_another_run_is_refused_by_what_differs(path: Path, kind: str, says: str) -> None:
    model, optimizer, options = other(kind)
    before = files(path)
    with pytest.raises(ModelMismatch, match=says):
        dualform.record(model, optimizer, path, resume_at=2, **options).start()
    assert files(path) == before
    assert hooks_of(model, optimizer) == 0


def test_without_resume_at_a_memory_is_never_written_over(path: Path) -> None:
    refused(path, loaded(0), MemoryExists, "already holds a memory.*resume_at")


def test_findings_of_dropped_steps_are_dropped(tmp_path: Path) -> None:
    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        for step in trained(*run, recorder, commits=(2,)):
            if step in (3, 5):
                nudged(run[0], "0.weight" if step == 3 else "2.bias")
    memory = dualform.open(tmp_path / "run")
    assert [(found.parameter, found.step) for found in memory.manifest.findings] == [("0.weight", 4), ("2.bias", 6)]
    assert not memory.certificate().exact
    memory = record(tmp_path / "run", since=3)
    assert memory.manifest.findings == ()
    assert memory.certificate().exact


def test_findings_of_kept_steps_are_kept(tmp_path: Path) -> None:
    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        for step in trained(*run, recorder, commits=(4,)):
            if step == 2:
                nudged(run[0], "0.weight")
            if step == 4:
                state = copy.deepcopy((run[0].state_dict(), run[1].state_dict()))
    before = dualform.open(tmp_path / "run").manifest.findings
    run = fresh()
    run[0].load_state_dict(state[0])
    run[1].load_state_dict(state[1])
    memory = record(tmp_path / "run", run, since=4)
    assert memory.manifest.findings == before
    assert [row.exact for row in memory.certificate()] == [False, True]


def test_what_was_told_of_dropped_steps_is_dropped(tmp_path: Path) -> None:
    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        for step in trained(*run, recorder):
            if step == 4:
                nudged(run[0], "0.weight")
    assert "changed outside the optimiser" in repr(dualform.open(tmp_path / "run"))
    memory = record(tmp_path / "run", since=3)
    assert memory.certificate().exact
    assert "changed outside the optimiser" not in repr(memory)


def test_what_was_told_before_is_not_told_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = loaded(0)
    for since in (0, 1):
        with dualform.record(model, optimizer, tmp_path / "run", resume_at=since):
            model(batch(1)[1]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert caplog.text.count("no ids are given") == 1
    assert len(dualform.open(tmp_path / "run").manifest.told) == 1


@pytest.mark.parametrize("since, left", [(2, 2), (3, 5), (6, 7)])
def test_nonfinite_events_of_dropped_steps_are_not_counted(tmp_path: Path, since: int, left: int) -> None:
    def steps(run: Run, recorder: dualform.Recorder, first: int) -> None:
        model, optimizer = run
        for step in range(first + 1, STEPS + 1):
            ids, x, y = batch(step)
            bad = {1: 2, 3: 3, 5: 2}.get(step, 0)
            if bad:  # rows of a backward pass that zero_grad forgets
                spoilt = x.clone()
                spoilt[:bad, 0] = math.nan
                with recorder.batch(ids):
                    F.cross_entropy(model[0](spoilt), y).backward()
                optimizer.zero_grad()
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                recorder.commit()

    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        steps(run, recorder, 0)
    assert dualform.open(tmp_path / "run").manifest.nonfinite == 7
    assert distance(run[0].state_dict(), STEPS) == 0.0
    run = loaded(since)
    with dualform.record(*run, tmp_path / "run", resume_at=since, on_error="raise") as recorder:
        assert dualform.open(tmp_path / "run").manifest.nonfinite == left
        steps(run, recorder, since)
    memory = dualform.open(tmp_path / "run")
    assert memory.manifest.nonfinite == 7
    assert memory.certificate().exact


def test_a_run_that_failed_is_gone_on_with_as_if_it_had_not(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", examples=COLUMNS) as recorder:
        for step in trained(*run, recorder, commits=(2, 5)):
            if step == 5:
                monkeypatch.setattr(recorder._stepping, "check_all", lambda: 1 / 0)
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 2
    assert "division by zero" in repr(memory)
    memory = record(tmp_path / "run", since=2)
    assert differences(memory, contents(dualform.open(original))) == []


@pytest.mark.parametrize("since", [2, 4, 6])
def test_keys_alone_are_gone_on_with(tmp_path: Path, since: int, caplog: pytest.LogCaptureFixture) -> None:
    before = record(tmp_path / "run", commits=(2,), keep="keys")
    expected = contents(before)
    memory = record(tmp_path / "run", since=since, keep="keys")
    assert differences(memory, expected) == []
    assert next(memory.blocks(0, STEPS)).gradients is None
    assert ("cannot be compared" in caplog.text) == (since == 4)


def test_keys_alone_still_tell_other_weights_at_a_commit(tmp_path: Path) -> None:
    record(tmp_path / "run", commits=(2,), keep="keys")
    refused(tmp_path / "run", loaded(3), ModelMismatch, "is not what it was after step 2 ", resume_at=2, keep="keys")


def two(step: int) -> tuple[nn.Sequential, list[torch.optim.SGD]]:
    """The model with an optimiser for each layer, after so many steps of both together."""
    model, _ = fresh()
    optimizers = [torch.optim.SGD(model[at].parameters(), lr=0.1, momentum=0.9) for at in (0, 2)]
    take_both(model, optimizers, None, 0, step)
    return model, optimizers


def take_both(
    model: nn.Module, optimizers: list[torch.optim.SGD], recorder: dualform.Recorder | None, since: int, until: int
) -> None:
    for step in range(since + 1, until + 1):
        ids, x, y = batch(step)
        with recorder.batch(ids) if recorder else nullcontext():
            F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if recorder and step == 3:
            recorder.commit()


@pytest.mark.parametrize("rounds", [2, 3, 5, 6])
def test_the_steps_of_several_optimisers_are_gone_on_with(tmp_path: Path, rounds: int) -> None:
    run = two(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        take_both(*run, recorder, 0, STEPS)
    expected = contents(dualform.open(tmp_path / "run"))
    assert expected["steps"] == 2 * STEPS
    run = two(rounds)
    with dualform.record(*run, tmp_path / "run", resume_at=2 * rounds, on_error="raise") as recorder:
        take_both(*run, recorder, rounds, STEPS)
    memory = dualform.open(tmp_path / "run")
    assert differences(memory, expected) == []
    assert memory.certificate().exact


def test_optimisers_in_another_order_are_another_run(tmp_path: Path) -> None:
    model, optimizers = two(0)
    with dualform.record(model, optimizers, tmp_path / "run"):
        take_both(model, optimizers, None, 0, 2)
    with pytest.raises(ModelMismatch, match="parameters.*optimizer=0.*optimizer=1"):
        dualform.record(model, optimizers[::-1], tmp_path / "run", resume_at=2).start()


@pytest.mark.parametrize("since", [2, 3])
def test_an_optimiser_without_exact_values_is_gone_on_with(tmp_path: Path, since: int) -> None:
    model, _ = fresh()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in trained(model, optimizer, recorder, commits=(2,)):
            if step == since:
                state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = contents(dualform.open(tmp_path / "run"))
    if since == 2:
        with pytest.raises(ModelMismatch, match="is not what it was after step 2"):
            dualform.record(model, optimizer, tmp_path / "run", resume_at=2).start()
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    with dualform.record(model, optimizer, tmp_path / "run", resume_at=since, on_error="raise") as recorder:
        list(trained(model, optimizer, recorder, since))
    assert differences(dualform.open(tmp_path / "run"), expected) == []


def normed(*before: nn.Module) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(*before, nn.ReLU(), nn.Linear(8, 4)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def resumed_inside_a_segment(path: Path, run: Run) -> tuple[dualform.Memory, list[dict[str, Any]]]:
    """A run that is gone on with from its step 4, with commits after steps 2 and 6; and its weights after each step."""
    saved = []
    with dualform.record(*run, path, on_error="raise") as recorder:
        for _ in trained(*run, recorder, commits=(2,)):
            saved.append(copy.deepcopy((run[0].state_dict(), run[1].state_dict())))
    run[0].load_state_dict(saved[3][0])
    run[1].load_state_dict(saved[3][1])
    return record(path, run, since=4), [state for state, _ in saved]


def test_unrecorded_parts_of_the_model_are_followed_across_a_resume(tmp_path: Path) -> None:
    memory, saved = resumed_inside_a_segment(tmp_path / "run", normed(nn.BatchNorm1d(6), nn.Linear(6, 8)))
    for step, state in enumerate(saved, start=1):
        values, steps = memory.others(step)
        assert set(steps.values()) == {step}
        assert all(values[name].equal(state[name]) for name in ("0.running_mean", "0.weight", "0.num_batches_tracked"))
    assert memory.certificate().exact


def test_a_bias_before_a_batch_norm_is_no_reason_to_refuse(tmp_path: Path) -> None:
    memory, _ = resumed_inside_a_segment(tmp_path / "run", normed(nn.Linear(6, 8), nn.BatchNorm1d(8)))
    assert memory.certificate().exact


def test_columns_are_kept_where_none_are_given(path: Path) -> None:
    run = loaded(2)
    with dualform.record(*run, path, resume_at=2, on_error="raise") as recorder:
        with pytest.raises(BadIds, match="outside the examples table, which has 8 entries"), recorder.batch([8]):
            pass
        list(trained(*run, recorder, since=2))
    memory = dualform.open(path)
    assert memory.columns == ["label"]
    assert memory.column("label").values.tolist() == COLUMNS["label"].tolist()


def test_columns_that_are_given_replace_and_join_those_that_are_there(path: Path) -> None:
    memory = record(path, since=3, examples={"label": [7] * 8, "name": list("abcdefgh")})
    assert memory.columns == ["label", "name"]
    assert memory.column("label").values.tolist() == [7] * 8
    assert memory.column("name").categories == tuple("abcdefgh")


def test_a_column_too_short_for_the_recorded_examples_is_refused(path: Path) -> None:
    refused(path, loaded(3), BadCall, "'label' has 2 entries", resume_at=3, examples={"label": [0, 1]})
