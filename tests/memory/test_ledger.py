"""Repeated keys are stored once: the ledger against a plain dict, and whole memories with and without it."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform.memory import ledger as module
from dualform.memory import repair
from dualform.memory.files import seal, tensor_bytes
from dualform.memory.ledger import Ledger, Stored
from dualform.memory.manifest import MANIFEST
from dualform.recording import recorder as recording

KEYS = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [torch.nan, 0.0]])  # 0 and −0 are equal and differ in a bit


@dataclasses.dataclass
class Enter:
    """One call of `Ledger.enter`: keys in parts, and of each the example and the position."""

    keys: list[Tensor]
    examples: np.ndarray
    positions: np.ndarray


@st.composite
def enters(draw: st.DrawFn, examples: int = 4, positions: int = 3) -> Enter:
    rows = draw(
        st.lists(
            st.tuples(st.integers(-1, examples), st.integers(0, positions), st.integers(0, len(KEYS) - 1)),
            min_size=1,
            max_size=8,
        )
    )
    numbers = np.array(rows)
    keys = KEYS[torch.from_numpy(numbers[:, 2])]
    cut = draw(st.integers(0, len(rows)))
    dtype = draw(st.sampled_from([torch.float32] * 9 + [torch.float64]))
    return Enter([keys[:cut], keys[cut:].to(dtype)], numbers[:, 0], numbers[:, 1])


class Dict:
    """What the ledger does, as plainly as possible: (example, position) -> the bytes last stored, and their number."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, int], tuple[bytes, int]] = {}
        self.stored = self.tries = self.matches = 0

    def enter(self, call: Enter) -> tuple[list[bool], list[int]]:
        shared = all(part.dtype == torch.float32 for part in call.keys)
        hopeless = self.tries >= module.TRIES and not self.matches
        new, numbers = [], []
        for key, example, position in _rows(call):
            slot = (example, position)
            if shared and not hopeless and example >= 0:
                self.tries += slot in self.last
                if self.last.get(slot, (b"",))[0] == key:
                    self.matches += 1
                    new.append(False)
                    numbers.append(self.last[slot][1])
                    continue
                self.last[slot] = (key, self.stored)
            new.append(True)
            numbers.append(self.stored)
            self.stored += 1
        return new, numbers


def _rows(call: Enter) -> Iterator[tuple[bytes, int, int]]:
    keys = [bytes(tensor_bytes(key)) for part in call.keys for key in part]
    return zip(keys, call.examples.tolist(), call.positions.tolist(), strict=True)


def enter(ledger: Ledger, call: Enter) -> tuple[list[bool], list[int]]:
    new, numbers = ledger.enter(call.keys, call.examples, call.positions)
    return new.tolist(), numbers.tolist()


def call(key: float, example: int, position: int = 0, dtype: torch.dtype = torch.float32) -> Enter:
    return Enter([torch.full((1, 2), key, dtype=dtype)], np.array([example]), np.array([position]))


@hypothesis.settings(max_examples=200)
@hypothesis.given(calls=st.lists(enters(), max_size=12), tries=st.sampled_from([1, 3, 1000]))
def test_the_ledger_is_a_dict(calls: list[Enter], tries: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TRIES", tries)
        ledger, plain = Ledger(), Dict()
        ledger._dtype = torch.float32
        for one in calls:
            assert enter(ledger, one) == plain.enter(one)
            assert ledger.stored == plain.stored
            assert ledger.append(2).tolist() == [plain.stored, plain.stored + 1]
            plain.stored += 2


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    calls=st.lists(enters(examples=30, positions=6), max_size=12), slots=st.sampled_from([1, 2, 7, 12, 40, 1000])
)
def test_a_number_is_always_that_of_an_equal_key(calls: list[Enter], slots: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLOTS", slots)
        ledger = Ledger()
        stored: list[tuple[bytes, int, int]] = []
        for one in calls:
            new, numbers = enter(ledger, one)
            for key, fresh, number in zip(_rows(one), new, numbers, strict=True):
                if fresh:
                    assert number == len(stored)
                    stored.append(key)
                assert stored[number] == key
            assert ledger.stored == len(stored)
            assert len(ledger._number) <= 2 * slots + 7


@hypothesis.given(before=st.lists(enters(), min_size=1, max_size=6), after=st.lists(enters(), min_size=1, max_size=6))
def test_a_recalled_ledger_goes_on_like_the_first(before: list[Enter], after: list[Enter]) -> None:
    ledger = Ledger()
    ledger._dtype = torch.float32
    stored: list[Stored] = []
    for one in before:
        new, numbers = ledger.enter(one.keys, one.examples, one.positions)
        keys = torch.cat(one.keys)[torch.from_numpy(new)]
        if len(keys):
            stored.append((keys, one.examples[new], one.positions[new], numbers[new]))
    recalled = Ledger(ledger.stored, lambda: iter(stored))
    recalled._dtype = torch.float32
    for one in after:
        assert enter(recalled, one) == enter(ledger, one)


def test_a_key_that_changes_every_time_is_stored_every_time_until_it_is_given_up() -> None:
    ledger = Ledger()
    for number in range(module.TRIES + 1):
        assert not ledger.hopeless
        assert enter(ledger, call(number, 0)) == ([True], [number])
    assert ledger.hopeless
    assert enter(ledger, call(module.TRIES, 0)) == ([True], [module.TRIES + 1])


def test_one_match_keeps_hope() -> None:
    ledger = Ledger()
    assert enter(ledger, call(1, 0)) == ([True], [0])
    assert enter(ledger, call(1, 0)) == ([False], [0])
    for number in range(1, module.TRIES + 5):
        enter(ledger, call(number + 1, 0))
    assert not ledger.hopeless


def test_keys_of_another_dtype_are_stored_and_the_first_ones_still_known() -> None:
    ledger = Ledger()
    assert enter(ledger, call(1, 0)) == ([True], [0])
    for number in (1, 2):
        assert enter(ledger, call(1, 0, dtype=torch.bfloat16)) == ([True], [number])
    assert enter(ledger, call(1, 0)) == ([False], [0])


def test_positions_may_grow() -> None:
    ledger = Ledger()
    for example, position, number in ((0, 0, 0), (5, 0, 1), (2, 3, 2), (5, 3, 3), (0, 40, 4)):
        assert enter(ledger, call(1, example, position)) == ([True], [number])
    for example, position, number in ((0, 0, 0), (5, 0, 1), (2, 3, 2), (5, 3, 3), (0, 40, 4)):
        assert enter(ledger, call(1, example, position)) == ([False], [number])


def test_examples_beyond_the_last_slot_are_stored_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOTS", 4)
    ledger = Ledger()
    assert enter(ledger, call(1, 3)) == ([True], [0])
    assert enter(ledger, call(1, 4)) == ([True], [1])
    assert enter(ledger, call(1, 4)) == ([True], [2])
    assert enter(ledger, call(1, 2**62)) == ([True], [3])
    assert enter(ledger, call(1, 3)) == ([False], [0])
    assert enter(ledger, call(1, 0, 2)) == ([True], [4])  # four examples of three positions are too many
    assert enter(ledger, call(1, 3)) == ([False], [0])


EXAMPLES, BATCH = 12, 4
STEPS = EXAMPLES // BATCH
Change = Callable[[Tensor, int], Tensor]


@dataclasses.dataclass
class Seen:
    """A recorded run, and what its two layers saw in every step."""

    memory: dualform.Memory
    model: nn.Module
    keys: list[list[Tensor]]
    ids: list[Tensor]
    checkpoints: list[dict[str, Any]]

    def stored(self) -> list[tuple[int, ...]]:
        return [segment.keys for segment in self.memory.manifest.segments]


def epochs(
    path: Path,
    count: int = 3,
    change: Change = lambda x, step: x,
    commit_at: Callable[[int], bool] = lambda step: step % STEPS == 0,
    length: Callable[[int], int] = lambda step: 1,
    autocast: Callable[[int], bool] = lambda step: False,
    warm_up: int = 0,
    resume: Seen | None = None,
    resume_at: int | None = None,
) -> Seen:
    """Some epochs over a small data set, in an order of their own; a commit after each."""
    data = torch.randn(EXAMPLES, 5, 6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[list[Tensor]] = [[], []]
    order: list[Tensor] = []
    if resume is not None and resume_at is not None:
        model.load_state_dict(resume.checkpoints[resume_at]["model"])
        optimizer.load_state_dict(copy.deepcopy(resume.checkpoints[resume_at]["optimizer"]))
        seen, order = [keys[:resume_at] for keys in resume.keys], resume.ids[:resume_at]
    for _ in range(warm_up):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoints = [_checkpoint(model, optimizer)] if resume is None else resume.checkpoints[: (resume_at or 0) + 1]
    columns = {"label": torch.arange(EXAMPLES) % 3}
    with dualform.record(model, optimizer, path, examples=columns, resume_at=resume_at, on_error="raise") as recorder:
        for step in range(len(order) + 1, STEPS * count + 1):
            epoch, at = divmod(step - 1, STEPS)
            generator = torch.Generator().manual_seed(10 + epoch)
            ids = torch.randperm(EXAMPLES, generator=generator)[at * BATCH : (at + 1) * BATCH]
            x = change(data[ids, : length(step)], step)
            with recorder.batch(ids), torch.autocast("cpu", torch.bfloat16, enabled=autocast(step)):
                hidden = model[1](model[0](x))
                out = model[2](hidden)
                F.cross_entropy(out[:, -1], ids % 4).backward()
            for keys, key in zip(seen, (x, hidden), strict=True):
                keys.append(key.detach().flatten(0, 1).to(out.dtype))
            order.append(ids.repeat_interleave(length(step)))
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.append(_checkpoint(model, optimizer))
            if commit_at(step):
                recorder.commit()
    return Seen(dualform.open(path), model, seen, order, checkpoints)


def _checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def require_what_was_seen(run: Seen) -> None:
    for weight in range(2):
        for rows in (2048, 3):
            blocks = list(run.memory.blocks(weight, run.memory.steps, rows=rows))
            found = torch.cat([block.keys for block in blocks])
            truth = torch.cat(run.keys[weight])
            assert found.to(truth.dtype).equal(truth)
        assert torch.cat([block.examples for block in blocks]).equal(torch.cat(run.ids))
    assert run.memory.verify().ok


def test_an_input_layers_keys_are_stored_once(tmp_path: Path) -> None:
    run = epochs(tmp_path / "run", count=4)
    assert run.stored() == [(12, 12), (0, 12), (0, 12), (0, 12)]
    assert [segment.events for segment in run.memory.manifest.segments] == [(12, 12)] * 4
    require_what_was_seen(run)
    assert run.memory.certificate().exact


def test_within_one_segment_too(tmp_path: Path) -> None:
    run = epochs(tmp_path / "run", commit_at=lambda step: False)
    assert run.stored() == [(12, 36)]
    require_what_was_seen(run)


def test_a_segment_takes_keys_from_many_before_it(tmp_path: Path) -> None:
    run = epochs(tmp_path / "run", commit_at=lambda step: step <= STEPS)
    assert run.stored() == [(4, 4), (4, 4), (4, 4), (0, 24)]
    require_what_was_seen(run)


def test_augmented_keys_are_all_stored(tmp_path: Path) -> None:
    run = epochs(tmp_path / "run", change=lambda x, step: x + step)
    assert run.stored() == [(12, 12)] * 3
    assert not any("w0/numbers" in file for file, _ in run.memory.segments)
    require_what_was_seen(run)


def test_keys_that_change_now_and_then(tmp_path: Path) -> None:
    # In the third epoch the keys are new, in the fourth they are those of the third.
    run = epochs(tmp_path / "run", count=4, change=lambda x, step: x + (step > 2 * STEPS))
    assert run.stored() == [(12, 12), (0, 12), (12, 12), (0, 12)]
    require_what_was_seen(run)


def test_an_input_that_is_trained_is_not_fixed(tmp_path: Path) -> None:
    run = epochs(tmp_path / "run", change=lambda x, step: x.clone().requires_grad_())
    assert run.stored() == [(12, 12)] * 3
    require_what_was_seen(run)


def test_sequences_that_grow(tmp_path: Path) -> None:
    run = epochs(tmp_path / "run", length=lambda step: 1 + (step - 1) // STEPS)
    assert run.stored() == [(12, 12), (12, 24), (12, 36)]
    require_what_was_seen(run)


def test_half_precision_in_some_steps(tmp_path: Path) -> None:
    run = epochs(tmp_path / "run", count=4, commit_at=lambda step: True, autocast=lambda step: STEPS < step <= 7)
    require_what_was_seen(run)
    assert [keys for keys, _ in run.stored()] == [*[4, 4, 4], *[4, 4, 4], *[4, 0, 0], *[0, 0, 0]]


def answers(run: Seen) -> dict[str, Any]:
    queries = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    attention = run.memory.attend(run.model, queries)["0"]
    top, within = attention.top(4), attention.top(2, within="label")
    contributions = attention.contributions(unit=1)
    return {
        "top": (top.scores.tolist(), top.events.tolist(), top.examples.tolist()),
        "within": (within.scores.tolist(), within.events.tolist()),
        "totals": attention.totals(by="label").values.tolist(),
        "contributions": contributions.top(3).scores.tolist(),
        "where": attention.where(label=1, step=slice(2, 6)).scores().tolist(),
        "output": attention.output().tolist(),
        "weights": {name: tensor.tolist() for name, tensor in run.memory.weights(until=5).items()},
        "certificate": repr(run.memory.certificate()),
    }


def test_questions_have_the_same_answers_as_without_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = epochs(tmp_path / "shared", commit_at=lambda step: step % 2 == 0)
    monkeypatch.setattr(module, "TRIES", 0)
    plain = epochs(tmp_path / "plain", commit_at=lambda step: step % 2 == 0)
    assert sum(keys for keys, _ in shared.stored()) == 12
    assert sum(keys for keys, _ in plain.stored()) == 36
    assert plain.memory.bytes > shared.memory.bytes
    assert answers(shared) == answers(plain)


@pytest.mark.parametrize("step", [0, 1, 3, 5, 6, 8, 9])
def test_a_resumed_run_knows_the_keys_that_are_left(step: int, tmp_path: Path) -> None:
    first = epochs(tmp_path / "run", commit_at=lambda step: step % 2 == 0)
    run = epochs(tmp_path / "run", count=4, resume=first, resume_at=step)
    require_what_was_seen(run)
    assert sum(keys for keys, _ in run.stored()) == 12
    assert run.memory.certificate().exact
    whole = epochs(tmp_path / "whole", count=4)
    assert answers(run)["top"] == answers(whole)["top"]


def test_keys_that_only_dropped_steps_had_are_stored_anew(tmp_path: Path) -> None:
    first = epochs(tmp_path / "run", change=lambda x, step: x + (step >= 5), commit_at=lambda step: False)
    assert first.stored() == [(12 + 12, 36)]
    run = epochs(tmp_path / "run", change=lambda x, step: x + (step >= 6), resume=first, resume_at=4)
    assert run.stored()[0] == (12, 16)
    assert sum(keys for keys, _ in run.stored()) == 24
    require_what_was_seen(run)


def as_format_1(path: Path) -> None:
    """The manifest as it was before repeated keys were stored once."""
    body = json.loads((path / MANIFEST).read_text())
    nonfinite = sum(segment.pop("nonfinite") for segment in body["segments"])
    for segment in body["segments"]:
        assert segment.pop("first_keys") == segment["first_events"]
        assert segment.pop("keys") == segment["events"]
        assert segment.pop("sketched") == segment["last_step"]
    body |= {"checksum": "0" * 16, "format": 1, "nonfinite": nonfinite}
    (path / MANIFEST).write_bytes(seal(json.dumps(body, separators=(",", ":")).encode()))


@pytest.fixture
def format_1(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """A memory without repeated keys and without sketches of the velocities, like those of format 1.

    Its parameter is the number of steps before recording began.
    """
    first, later = recording.initial_tensors, recording.sketch_tensors

    def initial(*arguments: Any) -> dict[str, Any]:
        return {name: part for name, part in first(*arguments).items() if not name.startswith("velocity_sketch/")}

    with monkeypatch.context() as patch:
        patch.setattr(module, "TRIES", 0)
        patch.setattr(recording, "initial_tensors", initial)
        patch.setattr(recording, "sketch_tensors", lambda sketches, velocities, hashes: later(sketches, {}, hashes))
        run = epochs(tmp_path / "run", warm_up=getattr(request, "param", 0))
    as_format_1(tmp_path / "run")
    return run


def test_a_memory_of_format_1_answers_like_before(format_1: Seen) -> None:
    old = dataclasses.replace(format_1, memory=dualform.open(format_1.memory.path))
    assert old.memory.manifest.format == 1
    assert old.memory.manifest.nonfinite == format_1.memory.manifest.nonfinite == 0
    assert answers(old) == answers(format_1)
    require_what_was_seen(old)


def test_nonfinite_events_of_format_1_are_still_counted(tmp_path: Path) -> None:
    def spoil(x: Tensor, step: int) -> Tensor:
        return x + (torch.nan if step == 8 else step)

    run = epochs(tmp_path / "run", change=spoil)
    assert run.memory.manifest.nonfinite > 0
    as_format_1(tmp_path / "run")
    assert dualform.open(tmp_path / "run").manifest.nonfinite == run.memory.manifest.nonfinite


@pytest.mark.parametrize("format_1", [0, 2], indirect=True)
@pytest.mark.parametrize("step", [6, 5])
def test_a_memory_of_format_1_can_be_gone_on_with(step: int, format_1: Seen) -> None:
    run = epochs(format_1.memory.path, count=4, resume=format_1, resume_at=step)
    assert run.memory.certificate().exact
    require_what_was_seen(run)
    assert run.stored()[-1] == (0, 12)
    assert run.memory.manifest.format == 2


def test_a_memory_of_format_1_can_be_repaired(format_1: Seen) -> None:
    path = format_1.memory.path / "segments/r000-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert repair(format_1.memory.path)[0].usable == 3
    memory = dualform.open(format_1.memory.path)
    assert memory.steps == 3
    assert memory.certificate().exact
    assert memory.verify().ok


def test_a_manifest_of_format_1_that_lacks_something_is_damaged(format_1: Seen) -> None:
    path = format_1.memory.path / MANIFEST
    body = json.loads(path.read_text())
    for name in ("nonfinite", "segments", "weights"):
        less = {key: value for key, value in body.items() if key != name} | {"checksum": "0" * 16}
        path.write_bytes(seal(json.dumps(less, separators=(",", ":")).encode()))
        with pytest.raises(dualform.errors.DamagedMemory):
            dualform.open(path.parent)


def test_a_memory_of_format_1_can_be_gone_on_with_twice(format_1: Seen) -> None:
    first = epochs(format_1.memory.path, count=4, resume=format_1, resume_at=6)
    run = epochs(format_1.memory.path, count=4, resume=first, resume_at=3)
    assert run.memory.certificate().exact
    require_what_was_seen(run)
