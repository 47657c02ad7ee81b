"""What can be summed before it is multiplied: the same totals as a loop over the events, and key sums that are kept."""

import copy
import errno
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import dualform
import plain
import scripts
from dualform.blocks import Block
from dualform.memory import StoredMemory
from dualform.memory.disk import disk
from dualform.memory.files import write_sealed
from dualform.memory.mapped import TensorFile
from dualform.queries import Attention, sums
from dualform.queries.sums import ExampleSums, example_sums
from plain import DIM_IN, EXAMPLES, Call, Event, History
from scripts import Narrow, Script, attention_of, is_sum, kept, narrowed

ORDERS = ["largest", "smallest", "absolute"]


@hypothesis.given(
    scripts.scripts(),
    scripts.queries(),
    st.sampled_from(scripts.COLUMNS),
    scripts.narrowings(),
    st.none() | st.integers(0, 6),
    st.booleans(),
    st.sampled_from([None, None, None, 0]),
)
@hypothesis.settings(max_examples=120)
def test_totals_of_any_run_are_those_of_a_loop(
    script: Script,
    queries: Tensor,
    columns: Any,
    narrowing: list[Narrow],
    until: int | None,
    absolute: bool,
    resident: int | None,
) -> None:
    check_totals(script, queries, columns, narrowing, until, absolute, resident)


POSITIVE = (("relu",), ("fixed",), ("relu", "fixed"), ("relu", "relu", "relu", "gauss"))


@hypothesis.given(
    scripts.scripts(POSITIVE),
    scripts.queries(POSITIVE),
    st.sampled_from(scripts.COLUMNS),
    scripts.narrowings(),
    st.none() | st.integers(0, 6),
)
@hypothesis.settings(max_examples=60)
def test_magnitudes_of_what_has_one_sign_are_those_of_a_loop(
    script: Script, queries: Tensor, columns: Any, narrowing: list[Narrow], until: int | None
) -> None:
    check_totals(script, queries, columns, narrowing, until, absolute=True, resident=None)


def check_totals(
    script: Script,
    queries: Tensor,
    columns: Any,
    narrowing: list[Narrow],
    until: int | None,
    absolute: bool,
    resident: int | None,
) -> None:
    history = script.record()
    until = None if until is None else min(until, history.steps)
    if resident is not None:
        history.memory.resident = resident  # no room for any sums: everything is scanned
    attention = narrowed(attention_of(history, queries, until), narrowing)
    found = attention.totals(by=columns, absolute=absolute)
    events = kept(history.until(history.steps if until is None else until), narrowing)
    assert found.values.shape == (len(queries), len(found.groups))
    assert {plain.group_of(event, columns) for event in events} - {None} <= set(found.groups)
    for at, query in enumerate(queries.tolist()):
        for number, group in enumerate(found.groups):
            inside = [events[i] for i in plain.in_group(events, columns, group)]
            assert is_sum(float(found.values[at, number]), inside, query, absolute), (group, found.explain())
    scripts.forget(history)


@hypothesis.given(
    scripts.scripts(scripts.FAMILIES[:-1]),
    scripts.queries(scripts.FAMILIES[:-1]),
    st.sampled_from(scripts.COLUMNS),
    scripts.narrowings(),
    st.sampled_from([1, 3, 200]),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.sampled_from([None, None, None, 0]),
)
@hypothesis.settings(max_examples=80)
def test_the_best_groups_of_any_run_are_those_with_the_best_sums(
    script: Script,
    queries: Tensor,
    columns: Any,
    narrowing: list[Narrow],
    k: int,
    order: str,
    absolute: bool,
    resident: int | None,
) -> None:
    history = script.record()
    if resident is not None:
        history.memory.resident = resident  # also every tile of one query by itself
    attention = narrowed(attention_of(history, queries, None), narrowing)
    found, totals = (
        attention.top(k, by=columns, order=order, absolute=absolute),
        attention.totals(by=columns, absolute=absolute),
    )
    events = kept(history.events, narrowing)
    there = {group: len(plain.in_group(events, columns, group)) for group in totals.groups}
    assert found.scores.shape == found.counts.shape == (len(queries), k)
    for at in range(len(queries)):
        sums_of = {group: float(totals.values[at, number]) for number, group in enumerate(totals.groups)}
        candidates = [group for group in totals.groups if there[group]]
        best = plain.best([sums_of[group] for group in candidates], k, order)
        expected = [candidates[i] for i in best]
        count = len(expected)
        assert found.groups[at][count:] == [None] * (k - count)
        assert found.scores[at, count:].isnan().all() and (found.counts[at, count:] == 0).all()
        assert found.counts[at, :count].tolist() == [there[group] for group in found.groups[at][:count]]
        # Sums may differ in their last bits between the two questions, and so may the order of equal ones.
        values = [sums_of[group] for group in expected]
        assert found.scores[at, :count].tolist() == pytest.approx(values, rel=1e-9, abs=1e-9)
        assert len(set(found.groups[at][:count])) == count
    scripts.forget(history)


@hypothesis.given(scripts.scripts(), scripts.queries(), st.sampled_from(scripts.COLUMNS), st.booleans())
@hypothesis.settings(max_examples=30)
def test_totals_have_the_same_bits_however_the_rows_are_split(
    script: Script, queries: Tensor, columns: Any, absolute: bool
) -> None:
    history = script.record()
    found = []
    for rows in (1, 3, 1000):
        memory = dualform.open(history.memory.path)
        with plain.blocks_of(rows):
            asked = memory.attend(None, {"fc": queries})["fc"].totals(by=columns, absolute=absolute)
        found.append(asked)
    if "scan" not in found[0].explain():
        assert all(torch.equal(one.values, found[0].values) for one in found)
    scripts.forget(history)


def record(path: Path, keys: list[Tensor], ids: list[list[int]], commits: tuple[int, ...] = ()) -> History:
    """One call a step, of these keys; all gradients are 1."""
    steps = [[Call(x, torch.ones(len(x), 3), one)] for x, one in zip(keys, ids, strict=True)]
    return plain.recorded(path, steps, commits)


def positive(steps: int, seed: int = 0, ids: int = 3, rows: int = 6) -> tuple[list[Tensor], list[list[int]]]:
    """Keys without a negative entry, several of every example."""
    generator = np.random.default_rng(seed)
    keys = [torch.from_numpy(generator.random((rows, DIM_IN))).float() for _ in range(steps)]
    return keys, [generator.integers(0, ids, rows).tolist() for _ in range(steps)]


Q = torch.tensor([[0.5, 1.0, 0.0, 2.0, 0.25], [1.0, -1.0, 0.5, 0.0, 3.0]])


def way(answer: Any) -> str:
    return str(answer.explanation.way)


def test_the_way_that_answers(tmp_path: Path) -> None:
    history = record(tmp_path / "run", *positive(12, ids=EXAMPLES))
    attention = attention_of(history, Q, None)
    per_example, one_pass, scan = "key sums per example", "key sums", "sums over a full scan"
    for columns in ("label", "name", "example", ("name", "label"), ("example",)):
        assert way(attention.totals(by=columns)) == way(attention.top(2, by=columns)) == per_example
    for narrow in (attention.where(label=7), attention.where(example=[1, 2]), attention.exclude(name="b", label=2)):
        assert way(narrow.totals(by="label")) == per_example
    for columns in ("step", "position", ("label", "step")):
        assert way(attention.totals(by=columns)) == one_pass
    assert way(attention.where(step=slice(2, 5)).totals(by="label")) == one_pass
    assert way(attention.exclude(position=1).totals(by="label")) == one_pass
    assert way(attention_of(history, Q, 5).totals(by="label")) == one_pass
    assert way(attention.timeline(4)) == one_pass
    mixed = f"{per_example}, for 1 of the queries a full scan"
    assert way(attention.totals(by="label", absolute=True)) == mixed
    assert way(attention[:1].totals(by="label", absolute=True)) == per_example
    assert way(attention[1:].totals(by="label", absolute=True)) == scan
    assert way(attention.timeline(4)) == "key sums of segments"  # for the second time
    again = dualform.open(history.memory.path).attend(None, {"fc": Q})["fc"]
    assert way(again[:1].timeline(4, absolute=True)) == one_pass
    for unit in (0, torch.tensor([0, 1])):
        assert way(attention.contributions(unit=unit).totals(by="label")) == scan
    many = attention_of(history, Q.repeat(16, 1), None).contributions
    assert way(many(unit=1).totals(by="label")) == "sums of weighted keys"
    assert way(many(unit=torch.tensor([0, 1] * 16)).totals(by="label")) == "sums of weighted keys"
    assert way(many(unit=torch.tensor([0, 1] * 16)).totals(by="label", absolute=True)) == scan
    assert way(many(direction=torch.randn(32, 3)).totals(by="label")) == scan
    assert way(many().totals(by="label")) == "events folded into a weight for each group"
    assert way(attention[:1].contributions().totals(by="label")) == scan
    assert way(many().timeline(3)) == scan


def test_sums_of_segments_are_read_once(tmp_path: Path) -> None:
    history = record(tmp_path / "run", *positive(12, ids=EXAMPLES))
    memory, asked = history.memory, attention_of(history, Q, 11)
    whole = attention_of(history, Q, None)
    assert torch.equal(whole.totals(by="step").values, whole.totals(by="step").values)
    first, again = (asked.totals(by="label") for _ in range(2))
    assert torch.equal(first.values, again.values)
    # Only the segment that goes on beyond step 11 is read again.
    ends = max((s for s in memory.manifest.segments if s.last_step <= 11), key=lambda s: s.last_step, default=None)
    rest = memory.events(0, 11) - (memory.events(0, ends.last_step) if ends else 0)
    assert (first.explanation.rows, again.explanation.rows) == (memory.events(0, 11), rest)
    fresh = dualform.open(memory.path).attend(None, {"fc": Q}, until=11)["fc"].totals(by="label")
    assert torch.equal(first.values, fresh.values)


def test_no_queries_have_no_totals(tmp_path: Path) -> None:
    attention = attention_of(record(tmp_path / "run", *positive(4)), Q[:0], None)
    for absolute in (False, True):
        assert attention.totals(by="label", absolute=absolute).values.shape == (0, 4)
        assert attention.top(2, by="label", absolute=absolute).scores.shape == (0, 2)
        assert attention.timeline(3, absolute=absolute).values.shape == (0, 3)
    assert attention.contributions(unit=0).totals(by="label").values.shape == (0, 4)
    assert attention.contributions().totals(by="label").values.shape == (0, 4, 3)
    assert attention.output().shape == (0, 3)


def test_rows_that_were_read(tmp_path: Path) -> None:
    attention = attention_of(record(tmp_path / "run", *positive(4)), Q, None)
    assert attention.totals(by="label").explain() == "key sums per example: 4 rows read"
    assert attention.totals(by="step").explain() == "key sums: 24 rows read"
    assert attention.where(step=[1, 2]).totals(by="step").explain() == "key sums: 12 rows read"


def test_repeated_keys_are_read_once(tmp_path: Path) -> None:
    table = torch.randn(EXAMPLES, DIM_IN, generator=torch.Generator().manual_seed(0))
    ids = [[0, 3, 1], [3, 0, 4], [1, 3, 0], [4, 3, 1], [0, 1, 3]]
    history = record(tmp_path / "run", [table[one] for one in ids], ids, commits=(2, 4))
    attention = attention_of(history, Q, None)
    asked: list[tuple[Attention, Callable[[Event], bool]]] = [
        (attention, lambda event: True),
        (attention.where(step=slice(2, 5)), lambda event: 2 <= event.step < 5),
        (attention.exclude(label=2), lambda event: event.label != 2),
        (attention_of(history, Q, 3), lambda event: event.step <= 3),
    ]
    for some, holds in asked:
        for columns in ("label", "step", ("step", "example")):
            found = some.totals(by=columns)
            assert found.explain() == "sums of repeated keys: 4 rows read"
            plainly = torch.zeros_like(found.values)
            for event in filter(holds, history.events):
                at = list(found.groups).index(plain.group_of(event, columns))
                plainly[:, at] += Q.double() @ torch.tensor(event.key, dtype=torch.float64)
            assert torch.allclose(found.values, plainly, rtol=0, atol=1e-12)


def test_many_groups_of_a_repeated_key(tmp_path: Path) -> None:
    """Where a key is in many groups, how often it is in each is a matrix."""
    table = torch.rand(2, DIM_IN, generator=torch.Generator().manual_seed(0))
    history = record(tmp_path / "run", [table[[0, 1, 0]]] * 30, [[0, 1, 0]] * 30, commits=(7, 20))
    attention = attention_of(history, Q.abs(), None)
    for absolute in (False, True):
        found = attention.timeline(30, absolute=absolute)
        assert way(found) == "sums of repeated keys"
        one = Q.abs().double() @ table.double().T
        assert torch.allclose(found.values, (2 * one[:, :1] + one[:, 1:]).expand(-1, 30), rtol=0, atol=1e-12)
        assert found.counts.tolist() == [3] * 30


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", ["label", "example", "step"])
def test_a_key_that_is_no_number_spoils_its_own_group_only(tmp_path: Path, bad: float, columns: str) -> None:
    keys, ids = positive(4, ids=4)
    keys[2][1, 3] = bad
    spoilt = Event(keys[2][1].tolist(), [], 3, ids[2][1], 0, 0)
    history = record(tmp_path / "run", keys, ids)
    found = attention_of(history, Q, None).totals(by=columns)
    assert "scan" in way(found)
    group = list(found.groups).index(plain.group_of(spoilt, columns))
    assert not found.values[0, group].isfinite()
    assert found.values[1, group].isnan(), "infinity times 0 is no number either"
    others = [at for at in range(len(found.groups)) if at != group]
    assert found.values[:, others].isfinite().all()


def test_keys_that_turn_negative_late_are_found_out(tmp_path: Path) -> None:
    keys, ids = positive(3)
    keys[2][4, 2] = -0.5
    attention = attention_of(record(tmp_path / "run", keys, ids), Q, None)
    for columns in ("label", "step"):
        found = attention.totals(by=columns, absolute=True)
        assert way(found) == "sums over a full scan"
        assert found.values.sum(dim=1).tolist() == pytest.approx((torch.cat(keys) @ Q.T).abs().sum(dim=0).tolist())


# From here on: the file.


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of the smallest memories are kept too."""
    monkeypatch.setattr(sums, "SMALL", 0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """From which step to which the events were read."""
    asked: list[tuple[int, int]] = []
    read = StoredMemory.blocks

    def noted(memory: StoredMemory, weight: int, until: int, *rest: Any, since: int = 0) -> Iterator[Block]:
        asked.append((since, until))
        return read(memory, weight, until, *rest, since=since)

    monkeypatch.setattr(StoredMemory, "blocks", noted)
    return asked


def file_of(path: Path) -> Path:
    return path / "derived/sums/w0.safetensors"


def sums_at(path: Path) -> ExampleSums:
    found = example_sums(dualform.open(path), 0)
    assert found is not None
    return found


def check(found: ExampleSums, events: list[Event]) -> None:
    """That these are the sums of some events."""
    assert len(found) > 1 + max(event.example for event in events)
    for example in range(-1, len(found) - 1):
        inside = [event.key for event in events if event.example == example]
        assert int(found.counts[example]) == len(inside)
        for at in range(DIM_IN):
            assert plain.close(float(found.sums[example, at]), [key[at] for key in inside])
    numbers = [number for event in events for number in event.key]
    assert found.finite is all(map(math.isfinite, numbers))
    assert found.nonnegative is all(math.isfinite(number) and number >= 0 for number in numbers)


@hypothesis.given(scripts.scripts())
@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_sums_per_example_of_any_run(script: Script) -> None:
    history = script.record()
    found = example_sums(history.memory, 0)
    if found is None:
        stored = sum(segment.keys[0] for segment in history.memory.manifest.segments)
        assert 4 * (history.memory.manifest.examples + 1) > stored
    else:
        check(found, history.events)
        again = sums_at(history.memory.path)
        assert torch.equal(again.sums.nan_to_num(1e9), found.sums.nan_to_num(1e9)) and again.counts.equal(found.counts)
        assert (again.finite, again.nonnegative) == (found.finite, found.nonnegative)
    scripts.forget(history)


def test_what_was_kept_is_used_again(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    history = record(tmp_path / "run", *positive(8), commits=(3, 5))
    first = attention_of(history, Q, None).totals(by="label")
    assert reads == [(0, 3), (3, 5), (5, 8)] and file_of(tmp_path / "run").exists()
    reads.clear()
    for memory in (history.memory, dualform.open(tmp_path / "run")):
        attention = memory.attend(None, {"fc": Q})["fc"]
        assert attention.totals(by="label").values.equal(first.values)
        assert attention.where(label=7).top(2, by="example").counts.shape == (2, 2)
    assert reads == []
    assert dualform.open(tmp_path / "run").verify().ok


def test_a_memory_that_grew_reads_what_is_new(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    keys, ids = positive(10, rows=30)
    ids[1] = [8] * 30
    model = plain.Twins(torch.float32)
    optimizer = plain.twins_optimizer(model)
    path = tmp_path / "run"
    with dualform.record(model, optimizer, path) as recorder:
        for step, (x, some) in enumerate(zip(keys, ids, strict=True), start=1):
            if step == 7:  # without ids, and ids that are new
                model.fc(x).sum().backward()
            else:
                with recorder.batch(torch.tensor(some) + (20 if step == 9 else 0)):
                    model.fc(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (2, 4, 6):
                recorder.commit()
                reads.clear()
                sums_at(path)
                assert reads == [(step - 2, step)]
    ids[6], ids[8] = [-1] * 30, [number + 20 for number in ids[8]]
    events = [
        Event(key, [], step, example, 0, 0)
        for step, (x, some) in enumerate(zip(keys, ids, strict=True), start=1)
        for key, example in zip(x.tolist(), some, strict=True)
    ]
    reads.clear()
    grown = sums_at(path)
    assert reads == [(6, 10)]
    check(grown, events)
    shutil.rmtree(path / "derived")
    anew = sums_at(path)
    assert anew.sums.equal(grown.sums) and anew.counts.equal(grown.counts), "bit for bit"


@pytest.mark.parametrize("step", [0, 2, 3, 4])
def test_a_run_that_went_back_is_summed_anew(tmp_path: Path, step: int) -> None:
    keys, ids = positive(12)
    path = tmp_path / "run"
    saved: list[Any] = []
    model = plain.Twins(torch.float32)
    optimizer = plain.twins_optimizer(model)

    def train(recorder: Any, number: int) -> None:
        with recorder.batch(torch.tensor(ids[number])):
            model.fc(keys[number]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with dualform.record(model, optimizer, path) as recorder:
        for number in range(5):
            if number == step:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            train(recorder, number)
            if number in (1, 3):
                recorder.commit()
    sums_at(path)
    before = file_of(path).read_bytes()
    model, optimizer = (new := plain.Twins(torch.float32)), plain.twins_optimizer(new)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with dualform.record(model, optimizer, path, resume_at=step) as recorder:
        for number in range(5, 9):
            train(recorder, number)
    kept_steps = [*range(step), *range(5, 9)]
    events = [
        Event(key, [], at, example, 0, 0)
        for at in kept_steps
        for key, example in zip(keys[at].tolist(), ids[at], strict=True)
    ]
    check(sums_at(path), events)
    assert file_of(path).read_bytes() != before


def test_sums_of_another_memory_are_not_used(tmp_path: Path) -> None:
    record(tmp_path / "other", *positive(6, seed=1))
    sums_at(tmp_path / "other")
    history = record(tmp_path / "run", *positive(6))
    shutil.copytree(tmp_path / "other/derived", tmp_path / "run/derived")
    check(sums_at(tmp_path / "run"), history.events)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def sealed(change: Callable[[dict[str, Tensor], dict[str, str]], Any]) -> Callable[[Path], None]:
    """A file whose checksum is right, though what is in it is not."""

    def write(path: Path) -> None:
        file = TensorFile(path.parent, file=path.name)
        tensors = {name: file.read(name).clone() for name in file.names()}
        metadata = {name: value for name, value in file.metadata.items() if name != "checksum"}
        change(tensors, metadata)
        write_sealed(path, tensors, metadata)

    return write


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": flipped,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "no header": lambda path: path.write_bytes(b"\xff" * 100),
    "without counts": sealed(lambda tensors, _: tensors.pop("counts")),
    "narrow": sealed(lambda tensors, _: tensors.update(sums=tensors["sums"][:, 1:].contiguous())),
    "no marks": sealed(lambda _, metadata: metadata.pop("segments")),
    "marks of something else": sealed(lambda _, metadata: metadata.update(segments="[1")),
    "a directory": a_directory,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run"
    history = record(path, *positive(6))
    sums_at(path)
    whole = file_of(path).read_bytes()
    DAMAGE[damage](file_of(path))
    with caplog.at_level("INFO", "dualform"):
        check(sums_at(path), history.events)
    assert "w0.safetensors is damaged and made anew" in caplog.text
    if damage != "a directory":
        assert file_of(path).read_bytes() == whole
        assert dualform.open(path).verify().ok


@pytest.mark.parametrize("refused", ["commit", "make_directory"])
def test_a_directory_that_cannot_be_written_still_answers(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[int, int]]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    history = record(tmp_path / "run", *positive(6))
    monkeypatch.setattr(disk, refused, refuse)
    for _ in range(2):
        found = example_sums(history.memory, 0)
        assert found is not None
        check(found, history.events)
    assert reads == [(0, 6)], "what cannot be kept is remembered"
    assert not file_of(tmp_path / "run").exists()


def test_deleting_it_loses_nothing(tmp_path: Path) -> None:
    history = record(tmp_path / "run", *positive(6), commits=(2,))
    attention = attention_of(history, Q, None)
    before = attention.totals(by="label").values
    content = file_of(tmp_path / "run").read_bytes()
    shutil.rmtree(tmp_path / "run/derived")
    assert attention.totals(by="label").values.equal(before)
    again = dualform.open(tmp_path / "run").attend(None, {"fc": Q})["fc"]
    assert again.totals(by="label").values.equal(before)
    assert file_of(tmp_path / "run").read_bytes() == content


def test_they_are_kept_only_where_they_are_worth_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = record(tmp_path / "few", *positive(2)).memory  # 12 keys: 4 rows of fp64 are more than half of them
    assert example_sums(few, 0) is None
    assert way(few.attend(None, {"fc": Q})["fc"].totals(by="label")) == "key sums"
    enough = record(tmp_path / "enough", *positive(3)).memory
    assert example_sums(enough, 0) is not None
    enough.resident = 2 * 8 * 4 * DIM_IN - 1
    assert example_sums(enough, 0) is None
    monkeypatch.setattr(sums, "SMALL", 1 << 20)
    small = record(tmp_path / "small", *positive(3)).memory
    assert example_sums(small, 0) is not None and not (tmp_path / "small/derived").exists()


def test_only_some_stay_in_memory(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        with recorder.batch(torch.arange(40) % 2):
            model(torch.randn(40, 4)).sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    memory.room.most = 2 * 3 * 4 * 8  # two weights' sums
    found = [example_sums(memory, weight) for weight in (0, 1, 2, 1)]
    assert found[1] is found[3]
    assert memory.room.used == memory.room.most
    assert example_sums(memory, 0) is not found[0]
