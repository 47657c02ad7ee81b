"""Keyframes: time travel from them is the fold of all events, and nothing is lost without them."""

import copy
import dataclasses
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.blocks import Block
from dualform.memory import StoredMemory
from dualform.memory.derived import KEYFRAME
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.queries import keyframes
from dualform.queries.folds import Folds
from dualform.queries.keyframes import Keyframes
from dualform.queries.selection import Selection
from loops import Run, runs, train
from small import batch, network

STEPS = 9


@dataclasses.dataclass
class Truth:
    """A recorded run, and what its parameters and its checkpoint were after every step."""

    path: Path
    weights: list[dict[str, Tensor]]
    checkpoints: list[Any]

    @property
    def memory(self) -> dualform.Memory:
        return dualform.open(self.path)


class Shared(nn.Module):
    """Two modules with one weight, and two more with one bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twin = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
        self.twin.weight = self.first.weight
        self.left, self.right = (nn.Linear(6, 4, dtype=torch.float64) for _ in range(2))
        self.right.bias = self.left.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(torch.tanh(self.twin(x))))
        return self.left(hidden) + self.right(hidden.square())


def record(
    path: Path,
    make: Callable[[], nn.Module] = network,
    options: dict[str, Any] | None = None,
    steps: int = STEPS,
    warm_up: int = 0,
    before_step: Callable[[torch.optim.Optimizer, int], None] | None = None,
    shift: int = 0,
    resume: tuple[Truth, int] | None = None,
    commit_every: int = 4,
) -> Truth:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), **(options or {"lr": 0.1, "momentum": 0.9}))
    truth, first = Truth(path, [], []), 0
    if resume is not None:
        truth, first = Truth(path, resume[0].weights[: resume[1]], resume[0].checkpoints[: resume[1]]), resume[1]
        state, of_optimizer = resume[0].checkpoints[first]
        model.load_state_dict(state)
        optimizer.load_state_dict(copy.deepcopy(of_optimizer))

    def step(number: int, recorder: Any = None) -> None:
        ids, x, y = batch(number + shift)
        if recorder is None:
            F.cross_entropy(model(x), y).backward()
        else:
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
        if before_step:
            before_step(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()

    def save() -> None:
        weights = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
        truth.weights.append(weights)
        truth.checkpoints.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))

    for number in range(warm_up):
        step(-1 - number)
    save()
    resume_at = None if resume is None else first
    with dualform.record(model, optimizer, path, resume_at=resume_at, on_error="raise") as recorder:
        for number in range(first + 1, steps + 1):
            step(number, recorder)
            save()
            if number % commit_every == 0:
                recorder.commit()
    return truth


def near(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-12) -> bool:
    assert found.keys() <= expected.keys()
    return all(float((found[n] - expected[n]).norm()) <= relative * float(expected[n].norm()) for n in found)


def files(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in (path / "derived/keyframes").glob("*"))


@pytest.fixture
def spacing(monkeypatch: pytest.MonkeyPatch) -> int:
    """A keyframe every two steps, however small the memory is."""
    monkeypatch.setattr(Keyframes, "spacing", 2)
    return 2


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """From which step to which the events of weight 0 were read."""
    asked: list[tuple[int, int]] = []
    read = StoredMemory.blocks

    def noted(memory: Any, weight: int, until: int, *rest: Any, since: int = 0, **more: Any) -> Iterator[Block]:
        if weight == 0 and (since, until) not in asked:
            asked.append((since, until))
        return read(memory, weight, until, *rest, since=since, **more)

    monkeypatch.setattr(StoredMemory, "blocks", noted)
    return asked


def halve(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / 2 ** (step // 3)


def without_momentum_in_between(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["momentum"] = 0.0 if step in (4, 5) else 0.9


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"options": {"lr": 0.1}},
    "momentum": {},
    "nesterov": {"options": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "dampening": {"options": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}},
    "decay": {"options": {"lr": 0.1, "weight_decay": 0.1}},
    "momentum and decay": {"options": {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.05}},
    "ascent": {"options": {"lr": 0.01, "momentum": 0.5, "maximize": True}},
    "schedule": {"before_step": halve},
    "momentum now and then": {"before_step": without_momentum_in_between},
    "velocity": {"warm_up": 3},
    "velocity, nesterov": {"warm_up": 2, "options": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "shared": {"make": Shared},
    "shared, velocity": {"make": Shared, "warm_up": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_from_keyframes_is_the_fold_of_all_events(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = record(tmp_path / "run", **SETTINGS[name])
    for spacing in (1, 2, 4):
        monkeypatch.setattr(Keyframes, "spacing", spacing)
        shutil.rmtree(tmp_path / "run/derived", ignore_errors=True)
        # Late steps first, early ones first, and each one by itself: from all keyframes, some and none.
        for asked in (range(STEPS, -1, -1), range(STEPS + 1)):
            memory = truth.memory
            for step in asked:
                found = memory.weights(until=step)
                whole = Folds(memory).whole(step, Selection())
                assert near({name: found[name] for name in whole}, whole)
                assert near(found, truth.weights[step])
        for step in range(STEPS + 1):
            assert near(truth.memory.weights(until=step), truth.weights[step])
        assert files(tmp_path / "run") == list(range(spacing, STEPS + 1, spacing))


def require_the_same(run: Run, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keyframes, "spacing", 1 + run.seed % 3)
        train(run, record=lambda model, optimizers: dualform.record(model, optimizers, path, on_error="raise"))
        memory = dualform.open(path)
        for step in range(memory.steps + 1):
            whole = Folds(memory).whole(step, Selection())
            found = Folds(memory).parameters(step, Selection())
            assert near(found, whole, relative=1e-11), step


@hypothesis.settings(max_examples=30)
@hypothesis.given(run=runs(torch.float64))
def test_any_run_has_the_same_weights_from_keyframes(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    require_the_same(run, tmp_path_factory.mktemp("keyframes") / "run")


def two_optimizers(path: Path, commits: tuple[int, ...] = (), on_commit: Callable[[], Any] = lambda: None) -> Truth:
    """Weights and biases have an optimiser each, so that a pass is used in two steps."""
    model = network()
    weights = [parameter for name, parameter in model.named_parameters() if "weight" in name]
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    pair = [torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.SGD(biases, lr=0.05)]
    truth = Truth(path, [copy.deepcopy(model.state_dict())], [])
    with dualform.record(model, pair, path, on_error="raise") as recorder:
        for number in range(1, 4):
            ids, x, y = batch(number)
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            for optimizer in pair:
                optimizer.step()
                truth.weights.append(copy.deepcopy(model.state_dict()))
                if len(truth.weights) - 1 in commits:
                    recorder.commit()
                    on_commit()
            model.zero_grad()
    return truth


@pytest.mark.parametrize("spacing", [1, 2, 3])
def test_a_keyframe_between_two_optimizers(spacing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keyframes, "spacing", spacing)
    truth = two_optimizers(tmp_path / "run")
    for asked in (range(6, -1, -1), range(7)):
        memory = truth.memory
        for step in asked:
            assert near(Folds(memory).whole(step, Selection()), truth.weights[step])
            assert near(memory.weights(until=step), truth.weights[step]), step


def test_a_keyframe_that_was_the_last_step_when_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keyframes, "spacing", 1)
    path = tmp_path / "run"
    truth = two_optimizers(path, commits=(1, 3, 4), on_commit=lambda: dualform.open(path).weights())
    for step in range(7):
        assert near(truth.memory.weights(until=step), truth.weights[step]), step


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_single_precision_loses_nothing_on_the_way(tmp_path: Path, spacing: int) -> None:
    truth = record(tmp_path / "run", make=lambda: nn.Sequential(Narrow(), *network(dtype=torch.float32)))
    memory = truth.memory
    for _ in range(2):
        for step in range(STEPS + 1):
            state = Keyframes(memory).at(step)
            assert state.step == step
            assert near(state.weights, Folds(memory).whole(step, Selection()))
            assert near(memory.weights(until=step), truth.weights[step], relative=1e-6)


def test_a_small_memory_has_none(tmp_path: Path) -> None:
    truth = record(tmp_path / "run")
    for step in range(STEPS + 1):
        assert near(truth.memory.weights(until=step), truth.weights[step])
    assert not (tmp_path / "run/derived").exists()


def test_their_number_follows_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = record(tmp_path / "run")
    monkeypatch.setattr(keyframes, "OPERATIONS", 1e12)
    step = 1e12 / Keyframes(truth.memory).spacing
    for spacing in (1, 3, 4, 5):
        shutil.rmtree(tmp_path / "run/derived", ignore_errors=True)
        monkeypatch.setattr(keyframes, "OPERATIONS", (spacing - 0.5) * step)
        truth.memory.weights(until=STEPS - 1)
        assert files(tmp_path / "run") == list(range(spacing, STEPS, spacing))
        truth.memory.weights()
        assert files(tmp_path / "run") == list(range(spacing, STEPS + 1, spacing))
    assert truth.memory.verify().files == 5 + 1  # the initial ones, three segments, the final ones


def test_what_was_kept_is_used_again(tmp_path: Path, spacing: int, reads: list[tuple[int, int]]) -> None:
    truth = record(tmp_path / "run")
    truth.memory.weights(until=7)
    assert reads == [(0, 2), (2, 4), (4, 6), (6, 7)]
    reads.clear()
    memory = truth.memory
    memory.weights(until=7)
    memory.weights(until=7)
    assert reads == [(6, 7)]
    reads.clear()
    memory.weights(until=4)
    assert reads == []
    memory.weights(until=5)
    assert reads == [(4, 5)]
    reads.clear()
    memory.weights()
    assert reads == [(6, 8), (8, 9)]


def test_few_of_them_stay_in_memory(tmp_path: Path, spacing: int) -> None:
    memory = record(tmp_path / "run").memory
    frames = Keyframes(memory)
    memory.room.most = 3 * frames.at(2).bytes
    for step in (*range(STEPS), *range(STEPS, 0, -1)):
        frames.at(step)
        assert 0 < memory.room.used <= memory.room.most


def test_a_mask_goes_past_them(tmp_path: Path, spacing: int, reads: list[tuple[int, int]]) -> None:
    memory = record(tmp_path / "run").memory
    memory.weights(until=6)
    reads.clear()
    masked = memory.weights(until=6, where={"step": slice(2, 4)})
    assert reads == [(0, 6)]
    assert near(masked, Folds(memory).whole(6, Selection().narrowed(memory, {"step": slice(2, 4)})))


def test_questions_about_an_earlier_step_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = record(tmp_path / "run").memory
    model, (_, x, _) = network(), batch(50)
    without = memory.attend(model, x, until=6)["2"].scores(), memory.dual(model, until=6)(x)
    monkeypatch.setattr(Keyframes, "spacing", 3)
    for _ in range(2):
        memory = dualform.open(tmp_path / "run")
        found = memory.attend(model, x, until=6)["2"].scores(), memory.dual(model, until=6)(x)
        assert all((one - other).abs().max() < 1e-6 for one, other in zip(found, without, strict=True))
    assert files(tmp_path / "run") == [3, 6]


def test_a_run_that_goes_on_keeps_them(tmp_path: Path, spacing: int, reads: list[tuple[int, int]]) -> None:
    first = record(tmp_path / "run", steps=8)
    first.memory.weights()
    reads.clear()
    truth = record(tmp_path / "run", steps=12, resume=(first, 8))
    assert near(truth.memory.weights(), truth.weights[12])
    assert reads == [(8, 10), (10, 12)]


@pytest.mark.parametrize("step", [0, 3, 4, 5])
def test_those_of_dropped_steps_are_not_used(
    step: int, tmp_path: Path, spacing: int, reads: list[tuple[int, int]]
) -> None:
    first = record(tmp_path / "run")
    first.memory.weights()
    assert files(tmp_path / "run") == [2, 4, 6, 8]
    before = {number: (tmp_path / "run" / KEYFRAME.format(number)).read_bytes() for number in (2, 4, 6, 8)}
    truth = record(tmp_path / "run", steps=10, resume=(first, step), shift=100)
    reads.clear()
    for number in range(10, -1, -1):
        assert near(truth.memory.weights(until=number), truth.weights[number])
    kept = max((number for number in before if number <= step), default=0)
    assert reads[0] == (kept, kept + 2)
    for number, content in before.items():
        same = (tmp_path / "run" / KEYFRAME.format(number)).read_bytes() == content
        assert same is (number <= step)


def test_those_of_another_memory_are_not_used(tmp_path: Path, spacing: int) -> None:
    other = record(tmp_path / "other", shift=100)
    other.memory.weights()
    truth = record(tmp_path / "run")
    shutil.copytree(tmp_path / "other/derived", tmp_path / "run/derived")
    for number in range(STEPS + 1):
        assert near(truth.memory.weights(until=number), truth.weights[number])


def test_those_of_a_run_that_was_deleted_are_not_used(tmp_path: Path, spacing: int) -> None:
    record(tmp_path / "run").memory.weights()
    for path in (tmp_path / "run").iterdir():
        if path.name != "derived":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    truth = record(tmp_path / "run")
    for number in range(STEPS, -1, -1):
        assert near(truth.memory.weights(until=number), truth.weights[number])


def test_a_file_under_the_wrong_name_is_not_used(tmp_path: Path, spacing: int) -> None:
    truth = record(tmp_path / "run", commit_every=STEPS)
    truth.memory.weights()
    shutil.copy(tmp_path / "run" / KEYFRAME.format(2), tmp_path / "run" / KEYFRAME.format(6))
    assert near(truth.memory.weights(until=7), truth.weights[7])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def of_nothing_known(path: Path) -> None:
    fingerprint = TensorFile(path.parent, file=path.name).metadata["fingerprint"]
    write_sealed(path, {"something/else": torch.zeros(2)}, {"fingerprint": fingerprint})


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": flipped,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "no header": lambda path: path.write_bytes(b"\xff" * 100),
    "of nothing known": of_nothing_known,
    "a directory": a_directory,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_made_anew(
    damage: str, tmp_path: Path, spacing: int, reads: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    truth = record(tmp_path / "run")
    truth.memory.weights()
    path = tmp_path / "run" / KEYFRAME.format(6)
    whole = path.read_bytes()
    DAMAGE[damage](path)
    reads.clear()
    with caplog.at_level("INFO", "dualform"):
        assert near(truth.memory.weights(until=7), truth.weights[7])
    assert reads == [(4, 6), (6, 7)]
    assert "00000006.safetensors is damaged and made anew" in caplog.text
    assert near(truth.memory.weights(until=7), truth.weights[7])
    if damage != "a directory":
        assert path.read_bytes() == whole
        assert truth.memory.verify().ok


@pytest.mark.parametrize("refused", ["commit", "make_directory"])
def test_a_directory_that_cannot_be_written_still_answers(
    refused: str, tmp_path: Path, spacing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    truth = record(tmp_path / "run")
    monkeypatch.setattr(disk, refused, refuse)
    memory = truth.memory
    for number in (7, 9, 2, 4, 0, 8):
        assert near(memory.weights(until=number), truth.weights[number])
    assert not list((tmp_path / "run").glob("derived/**/*.safetensors*"))


def test_a_stale_one_that_cannot_be_removed_is_not_used(
    tmp_path: Path, spacing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    record(tmp_path / "other", shift=100).memory.weights()
    truth = record(tmp_path / "run")
    shutil.copytree(tmp_path / "other/derived", tmp_path / "run/derived")
    monkeypatch.setattr(disk, "remove", refuse)
    monkeypatch.setattr(disk, "commit", refuse)
    for number in (7, 9, 2, 4, 0, 8):
        assert near(truth.memory.weights(until=number), truth.weights[number])


def test_deleting_them_loses_nothing(tmp_path: Path, spacing: int) -> None:
    truth = record(tmp_path / "run")
    before = [truth.memory.weights(until=number) for number in range(STEPS + 1)]
    content = {number: (tmp_path / "run" / KEYFRAME.format(number)).read_bytes() for number in (2, 4, 6, 8)}
    memory = truth.memory
    shutil.rmtree(tmp_path / "run/derived")
    for opened in (memory, truth.memory):
        for number in range(STEPS + 1):
            found = opened.weights(until=number)
            assert all(found[name].equal(tensor) for name, tensor in before[number].items())
    assert {n: (tmp_path / "run" / KEYFRAME.format(n)).read_bytes() for n in (2, 4, 6, 8)} == content
    assert truth.memory.verify().ok


def test_the_certificate_is_measured_past_them(
    tmp_path: Path, spacing: int, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[int, int]]
) -> None:
    truth = record(tmp_path / "run")
    truth.memory.weights()
    monkeypatch.setattr(Keyframes, "at", lambda *_: pytest.fail("a keyframe was used"))
    reads.clear()
    certificate = truth.memory.certificate()
    assert certificate.exact
    assert reads == [(0, STEPS)]


def test_keyframes_whose_tensors_fill_no_whole_pages_are_used_again(tmp_path: Path, spacing: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(96, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(20):
            with recorder.batch(torch.arange(4)):
                model(torch.randn(4, 96, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    first = dualform.open(tmp_path / "run").weights(until=13)
    files = {path: path.stat() for path in (tmp_path / "run/derived/keyframes").iterdir()}
    assert files
    again = dualform.open(tmp_path / "run").weights(until=13)
    assert all(path.stat().st_mtime_ns == stat.st_mtime_ns for path, stat in files.items())
    assert all(first[name].equal(again[name]) for name in first)
