"""Damage: every flipped bit is found, none becomes a wrong answer, and what is whole can still be used."""

import contextlib
import copy
import json
import logging
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.errors import BadMemory, DamagedMemory, DualformError, EmptyMemory, MemoryInUse, NewerFormat
from dualform.memory import Verification, repair, verify
from dualform.memory import files as files_module
from dualform.memory import mapped as mapped_module
from dualform.memory.lock import LOCK
from dualform.memory.manifest import MANIFEST, read_manifest
from dualform.queries import best, groupfolds, search, sums
from dualform.queries.groupfolds import group_folds
from dualform.queries.index import index_of
from dualform.queries.keyframes import Keyframes

EXAMPLES, STEPS, LENGTH = 18, 8, 2  # a segment has two steps
COLUMNS = {"label": torch.arange(EXAMPLES) % 3, "name": 3 * ["a", "b", "ä", "b", "a", "c"]}
X = torch.randn(EXAMPLES, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Chunks, pages and keyframes for a memory so small that every bit of it could be flipped."""
    with pytest.MonkeyPatch.context() as patch:
        # The package's name for the module of `verify` is that of the function.
        for module in (files_module, mapped_module, sys.modules[verify.__module__]):
            patch.setattr(module, "CHUNK", 1024)
        patch.setattr(files_module, "LARGE", 256)
        patch.setattr(Keyframes, "spacing", 4)
        patch.setattr(groupfolds, "STRIDE", 1)
        patch.setattr(best, "FEW", 1)
        patch.setattr(search, "SEED", 4)
        patch.setattr(sums, "SMALL", 0)
        patch.setattr("os.fsync", lambda handle: None)
        yield


@dataclass
class Run:
    """A recorded run: where it is, and its weights and checkpoints after every step."""

    path: Path
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    checkpoints: list[Any] = field(default_factory=list)

    def copied(self, to: Path) -> "Run":
        shutil.copytree(self.path, to)
        return Run(to, self.weights, self.checkpoints)

    def resume(self, step: int, until: int, shift: int = 50, close: bool = True) -> None:
        """Go on from the checkpoint of a step, with other batches than before."""
        train(Run(self.path, self.weights[: step + 1], self.checkpoints[: step + 1]), until, step, shift, close)


def load(run: Run, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state, of_optimizer = run.checkpoints[step]
    model.load_state_dict(state)
    optimizer.load_state_dict(copy.deepcopy(of_optimizer))


def train(run: Run, until: int, resume_at: int | None = None, shift: int = 0, close: bool = True) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if resume_at is not None:
        load(run, resume_at, model, optimizer)

    def save() -> None:
        run.checkpoints.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        run.weights.append(run.checkpoints[-1][0])

    recorder = dualform.record(
        model, optimizer, run.path, examples=COLUMNS, resume_at=resume_at, on_error="raise"
    ).start()
    if resume_at is None:
        save()
    for step in range((resume_at or 0) + 1, until + 1):
        ids = torch.randint(EXAMPLES, (14,), generator=torch.Generator().manual_seed(step + shift))
        with recorder.batch(ids):
            F.cross_entropy(model(X[ids]), ids % 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        save()
        if step % LENGTH == 0:
            recorder.commit()
    if close:
        recorder.close()
    else:
        recorder._remove_hooks()
        recorder._lock.release()
    return run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, small_pieces: None) -> Run:
    """A closed run with columns and every derived part; not to be changed."""
    run = train(Run(tmp_path_factory.mktemp("damage") / "run"), STEPS)
    assert None not in asked(run.path)
    derived = [file.removeprefix("derived/") for file in files(run.path) if file.startswith("derived/")]
    assert len(files(run.path)) == 1 + 1 + 4 + 1 + 2 + len(derived)
    assert {file.partition("/")[0] for file in derived} == {"keyframes", "folds", "shadow", "sums"}
    kinds = {Path(file).name.partition("w")[0] for file in derived if file.startswith("shadow/")}
    assert kinds == {"", "bytes-", "examples-"}
    return run


@pytest.fixture
def run(original: Run, tmp_path: Path) -> Run:
    return original.copied(tmp_path / "run")


def files(path: Path) -> list[str]:
    """Everything that is part of a memory, as paths within it."""
    found = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
    return [str(file) for file in found if file.name != LOCK and file.suffix != ".tmp"]


def contents(path: Path) -> dict[str, bytes]:
    return {file: (path / file).read_bytes() for file in files(path)}


def ranges(path: Path) -> dict[str, list[tuple[str, int, int]]]:
    """The bytes of a memory by what they hold: file, first, one after the last."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for file in files(path):
        content = (path / file).read_bytes()
        if file == MANIFEST:
            found["manifest"] = [(file, 0, len(content))]
            continue
        kind = "/".join(file.split("/")[: 2 if file.startswith("derived/") else 1]).removesuffix(".safetensors")
        start = 8 + int.from_bytes(content[:8], "little")
        found.setdefault(f"{kind} header", []).append((file, 0, start))
        header = json.loads(content[8:start])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                part = name.split("/")[name.startswith(("w0/", "w1/"))]
                if begin < end:
                    found.setdefault(f"{kind} {part}", []).append((file, start + begin, start + end))
    return found


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << bit)
        file.seek(at)
        file.write(bytes([byte]))


def flips(path: Path, count: int) -> list[tuple[str, int, int]]:
    """Positions spread over everything that a memory holds: file, byte, bit."""
    chosen = random.Random(1)
    kinds = ranges(path)
    result = []
    for number in range(count):
        places = kinds[sorted(kinds)[number % len(kinds)]]
        file, begin, end = chosen.choice(places)
        result.append((file, chosen.randrange(begin, end), chosen.randrange(8)))
    return result


SHADOW = {"header", "padding", "numbers", "scale", "norms", "basis", "level0", "level1", "level2", "fine", "front"}
SHADOW |= {"first", "bytes", "scales", "errors"}  # of keys in bytes


def test_every_kind_of_byte_is_tried(original: Run) -> None:
    parts = {"header", "keys", "gradients", "examples", "calls", "numbers", "journal", "sketch", "velocity_sketch"}
    expected = {f"segments {part}" for part in (*parts, "hashes", "padding")}
    expected |= {f"initial {part}" for part in ("header", "parameter", "probe", "sketch")}
    expected |= {"manifest", "final header", "final parameter", "examples header", "examples values"}
    states = ("header", "weight", "velocity")
    expected |= {f"derived/{kind} {part}" for kind in ("keyframes", "folds") for part in states}
    expected |= {f"derived/sums {part}" for part in ("header", "sums", "counts", "padding")} | {"derived/folds padding"}
    expected |= {f"derived/shadow {part}" for part in SHADOW}
    assert set(ranges(original.path)) == expected


def test_every_flipped_bit_is_found(run: Run) -> None:
    before = contents(run.path)
    for file, at, bit in flips(run.path, 1000):
        flip(run.path / file, at, bit)
        if file == MANIFEST:
            with pytest.raises(BadMemory, match=str(run.path)):
                verify(run.path)
        else:
            found = verify(run.path)
            assert not found.ok
            assert found.damaged == (file,)
            assert len(found.problems) == 1
            assert str(run.path / file) in found.problems[0]
        flip(run.path / file, at, bit)
    assert contents(run.path) == before
    assert verify(run.path).ok


def test_no_byte_of_the_manifest_can_change(run: Run) -> None:
    path = run.path / MANIFEST
    content = path.read_bytes()
    # The number of the format is read first, so that a later one is told as such.
    number = content.index(b'"format":') + len(b'"format":')
    for at in range(len(content)):
        for bit in range(8) if at == number else (at % 8,):
            flip(path, at, bit)
            with pytest.raises((DamagedMemory, NewerFormat) if at == number else DamagedMemory):
                read_manifest(run.path)
            flip(path, at, bit)
    read_manifest(run.path)


Answer = Callable[[dualform.Memory], Any]


def weights(memory: dualform.Memory, step: int) -> Any:
    return {name: tensor.tolist() for name, tensor in memory.weights(until=step).items()}


def top(memory: dualform.Memory) -> Any:
    found = memory.attend(None, {"0": X, "2": torch.ones(1, 5)})
    best = [found[layer].top(5) for layer in ("0", "2")]
    return [(one.scores.tolist(), one.events.tolist(), one.examples.tolist(), one.steps.tolist()) for one in best]


def totals(memory: dualform.Memory, column: str) -> Any:
    found = memory.attend(None, {"0": X})["0"].contributions(unit=0).totals(by=column)
    return list(found.groups), found.values.tolist()


def column(memory: dualform.Memory, name: str) -> Any:
    found = memory.column(name)
    return found.values.tolist(), found.categories


def best_examples(memory: dualform.Memory) -> Any:
    found = memory.attend(None, {"2": torch.ones(1, 5)})["2"].top(1, by="example")
    return [list(groups) for groups in found.groups], found.scores.tolist()


def without_a_group(memory: dualform.Memory, step: int) -> Any:
    parts = group_folds(memory, memory.folds, ("label",)).without([0], step)
    return {name: part.tolist() for name, part in parts.items()}


def keys_in_bytes(memory: dualform.Memory) -> Any:
    return [{name: t.tolist() for name, t in part.tensors().items()} for part in index_of(memory).coarse(0)]


QUESTIONS: list[Answer] = [
    lambda memory: weights(memory, 1),
    lambda memory: weights(memory, 5),
    top,
    lambda memory: totals(memory, "label"),
    lambda memory: totals(memory, "name"),
    lambda memory: column(memory, "label"),
    lambda memory: column(memory, "name"),
    lambda memory: repr(memory.certificate()),
    best_examples,
    lambda memory: without_a_group(memory, 5),
    lambda memory: without_a_group(memory, STEPS),
    keys_in_bytes,
]


def asked(path: Path, allowed: type[Exception] = DamagedMemory) -> list[Any]:
    """The answers; None where the damage was told instead."""
    answers: list[Any] = [None] * len(QUESTIONS)
    try:
        memory = dualform.open(path)
    except allowed:
        return answers
    for at, question in enumerate(QUESTIONS):
        with contextlib.suppress(allowed):
            answers[at] = question(memory)
    return answers


def test_no_flipped_bit_becomes_a_wrong_answer(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(run.path)
    right = asked(run.path)
    told = 0
    caplog.set_level(logging.INFO, "dualform")
    for file, at, bit in flips(run.path, 200):
        flip(run.path / file, at, bit)
        caplog.clear()
        found = asked(run.path, BadMemory if file == MANIFEST else DamagedMemory)
        assert all(one in (None, truth) for one, truth in zip(found, right, strict=True)), (file, at, bit)
        told += None in found
        if file.startswith("derived/"):
            assert None not in found
            assert f"{run.path / file} is damaged and made anew" in caplog.text
        (run.path / file).write_bytes(before[file])
    assert told > 50
    assert contents(run.path) == before
    assert "off its sketch" not in caplog.text


def test_damage_that_is_not_touched_does_not_hide_the_rest(run: Run) -> None:
    begin = next(begin for file, begin, _ in ranges(run.path)["segments padding"] if file == segment(3))
    right = asked(run.path)
    flip(run.path / segment(3), begin + 2000, 0)
    assert verify(run.path).damaged == (segment(3),)
    assert asked(run.path) == right  # padding is never read
    begin = next(begin for file, begin, _ in ranges(run.path)["segments gradients"] if file == segment(3))
    flip(run.path / segment(3), begin, 0)
    memory = dualform.open(run.path)
    assert memory.attend(None, {"0": X}, until=6)["0"].top(5).scores.isfinite().all()
    assert memory.weights(until=6).keys() == run.weights[6].keys()
    with pytest.raises(DamagedMemory, match="000003"):
        memory.attend(None, {"0": X})["0"].top(5)
    with pytest.raises(DamagedMemory, match="000003"):
        memory.certificate()


CUTS: dict[str, Callable[[bytes], bytes | None]] = {
    "the last byte": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "all but the header's length": lambda content: content[:8],
    "all": lambda content: b"",
    "longer": lambda content: content + b"\0",
    "replaced": lambda content: b"\0" * len(content),
    "deleted": lambda content: None,
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_file_is_found(cut: str, run: Run) -> None:
    before = contents(run.path)
    right = asked(run.path)
    for file, content in before.items():
        left = CUTS[cut](content)
        if left is None:
            (run.path / file).unlink()
        else:
            (run.path / file).write_bytes(left)
        found = asked(run.path, DualformError if cut == "deleted" else DamagedMemory)
        assert all(one in (None, truth) for one, truth in zip(found, right, strict=True)), file
        if file.startswith("derived/"):
            assert None not in found
        if left is not None:
            (run.path / file).write_bytes(left)  # a question may have made it anew
        elif (run.path / file).exists():
            (run.path / file).unlink()
        if file == MANIFEST:
            with pytest.raises(EmptyMemory if cut == "deleted" else DamagedMemory):
                verify(run.path)
        else:
            # Columns and derived parts may be deleted at any time: nothing else names them.
            expected = () if cut == "deleted" and file.startswith(("examples/", "derived/")) else (file,)
            assert verify(run.path).damaged == expected
        (run.path / file).write_bytes(content)
    assert verify(run.path).ok


def damage(run: Run, *damaged: str) -> Verification:
    for file in damaged:
        flip(run.path / file, (run.path / file).stat().st_size // 2, 3)
    found = verify(run.path)
    assert not found.ok
    assert set(found.damaged) == set(damaged)
    assert found.steps == STEPS
    return found


def segment(number: int) -> str:
    return f"segments/r000-{number:06d}.safetensors"


KEYFRAME = "derived/keyframes/00000004.safetensors"
USABLE = {
    ("initial.safetensors",): -1,
    ("initial.safetensors", segment(2)): -1,
    (segment(0),): 0,
    (segment(1),): 2,
    (segment(2),): 4,
    (segment(3),): 6,
    (segment(3), segment(1)): 2,
    ("final.safetensors",): 8,
    ("examples/label.safetensors",): 8,
    ("examples/name.safetensors", KEYFRAME): 8,
    (KEYFRAME,): 8,
    (segment(2), "final.safetensors", "examples/name.safetensors", KEYFRAME): 4,
}


@pytest.mark.parametrize("damaged", USABLE)
def test_what_is_usable(damaged: tuple[str, ...], run: Run) -> None:
    found = damage(run, *damaged)
    usable = USABLE[damaged]
    assert found.usable == usable
    if usable == -1:
        assert "initial.safetensors from a copy" in found.verdict
    elif usable == 0:
        assert found.verdict.startswith("of 8 steps, no step can be used")
    elif usable < STEPS:
        assert found.verdict.startswith(f"of 8 steps, steps 1 to {usable} can be used")
    else:
        assert found.verdict.startswith("all 8 steps can be used")
    assert ("--repair" in found.verdict) is (usable >= 0)
    assert found.verdict in repr(found)
    assert all(str(run.path / file) in repr(found) for file in damaged)


def test_a_whole_memory_has_nothing_to_say(run: Run) -> None:
    found = verify(run.path)
    assert found.ok
    assert (found.problems, found.damaged, found.usable, found.steps) == ((), (), STEPS, STEPS)
    assert found.verdict == "all 8 steps can be used"
    sizes = {file: len(content) for file, content in contents(run.path).items() if file != MANIFEST}
    assert (found.files, found.bytes) == (len(sizes), sum(sizes.values()))


def require_a_whole_memory(run: Run, steps: int) -> dualform.Memory:
    """Verified, exact, with the weights of every step, and ready to be gone on with."""
    assert verify(run.path).ok
    memory = dualform.open(run.path)
    assert memory.steps == steps
    for step in range(steps + 1):
        for name, tensor in memory.weights(until=step).items():
            assert (tensor - run.weights[step][name]).abs().max() < 1e-6
    if steps:
        assert memory.certificate().exact
    return memory


@pytest.mark.parametrize("damaged", [case for case, usable in USABLE.items() if usable >= 0])
def test_repair_keeps_the_longest_whole_prefix(damaged: tuple[str, ...], run: Run) -> None:
    usable = USABLE[damaged]
    found = damage(run, *damaged)
    before = contents(run.path)
    result, done = repair(run.path)
    assert result == found
    after = contents(run.path)
    memory = require_a_whole_memory(run, usable)

    dropped = {segment(number) for number in range(usable // LENGTH, STEPS // LENGTH)}
    aside = dropped | {file for file in damaged if not file.startswith("derived/")}
    aside |= {"final.safetensors"} if dropped else set()
    removed = {file for file in damaged if file.startswith("derived/")}
    assert after.keys() - before.keys() == {"damaged/" + file.replace("/", "-") for file in aside}
    assert before.keys() - after.keys() == aside | removed
    assert all(after["damaged/" + file.replace("/", "-")] == before[file] for file in aside)
    assert all(after[file] == before[file] for file in before.keys() & after.keys() - {MANIFEST})

    for file in aside:
        assert any(f"{file} was moved to damaged/" in sentence for sentence in done)
    for file in removed:
        assert f"{file} was removed; it is made anew when it is needed" in done
    if usable < STEPS:
        assert done[0].startswith(f"steps {usable + 1} to 8 were dropped: ")
        assert memory.manifest.told[-1] == f"repaired: {done[0]}"
        assert memory.manifest.told[-1] in repr(memory)
    assert len(done) == len(aside | removed) + (usable < STEPS)
    assert memory.columns == [name for name in ("label", "name") if f"examples/{name}.safetensors" not in damaged]
    assert (memory.manifest.final is not None) is (usable == STEPS and "final.safetensors" not in damaged)


@pytest.mark.parametrize("number", range(4))
def test_a_repaired_run_goes_on(number: int, run: Run) -> None:
    damage(run, segment(number))
    _, done = repair(run.path)
    run.resume(number * LENGTH, until=10)
    memory = dualform.open(run.path)
    assert verify(run.path).ok
    assert memory.steps == 10
    assert memory.certificate().exact
    assert f"repaired: {done[0]}" in memory.manifest.told
    assert len(list((run.path / "segments").iterdir())) == 5
    assert len(list((run.path / "damaged").iterdir())) == 4 - number + 1


def test_a_repaired_run_that_goes_on_with_the_same_batches_is_the_run_it_was(run: Run) -> None:
    right = asked(run.path)
    damage(run, segment(2))
    repair(run.path)
    run.resume(4, until=STEPS, shift=0)
    assert asked(run.path) == right
    require_a_whole_memory(run, STEPS)


def test_a_second_repair_does_nothing(run: Run) -> None:
    damage(run, segment(2), "examples/label.safetensors", KEYFRAME)
    repair(run.path)
    before = contents(run.path)
    found, done = repair(run.path)
    assert (found.ok, done) == (True, ())
    assert contents(run.path) == before


def test_repair_of_a_whole_memory_changes_nothing(run: Run) -> None:
    before = contents(run.path)
    found, done = repair(run.path)
    assert (found.ok, done) == (True, ())
    assert found == verify(run.path)
    assert contents(run.path) == before


def test_repair_of_missing_files(run: Run) -> None:
    for file in (segment(2), "final.safetensors"):
        (run.path / file).unlink()
    found, done = repair(run.path)
    assert found.usable == 4
    assert f"{segment(2)} is missing" in done
    assert "final.safetensors is missing" in done
    require_a_whole_memory(run, 4)


def test_a_memory_that_is_being_recorded_is_not_repaired(run: Run) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    load(run, STEPS, model, optimizer)
    with dualform.record(model, optimizer, run.path, resume_at=STEPS):
        flip(run.path / segment(1), 5000, 1)
        before = contents(run.path)
        with pytest.raises(MemoryInUse):
            repair(run.path)
        assert contents(run.path) == before
        assert verify(run.path).usable == 2
    assert repair(run.path)[0].usable == 2


@pytest.mark.parametrize("file", ["initial.safetensors", MANIFEST])
def test_without_its_beginning_a_memory_cannot_be_repaired(file: str, run: Run) -> None:
    flip(run.path / file, (run.path / file).stat().st_size // 2, 3)
    before = contents(run.path)
    for _ in range(2):
        with pytest.raises(DamagedMemory, match=file):
            repair(run.path)
    assert contents(run.path) == before


def test_damage_after_damage_keeps_both_files(run: Run) -> None:
    for number in range(3):
        flip(run.path / segment(1), 5000 + number, 3)
        repair(run.path)
        run.resume(2, until=4, shift=100 * number)
    names = {path.name for path in (run.path / "damaged").iterdir()}
    once = "segments-r000-000001.safetensors"
    assert {once, f"2-{once}", f"3-{once}"} <= names
    assert {"final.safetensors", "2-final.safetensors", "3-final.safetensors"} <= names
    several = [(run.path / "damaged" / name).read_bytes() for name in sorted(names) if once in name]
    assert len(set(several)) == 3
    assert dualform.open(run.path).certificate().exact


def test_a_cut_run_whose_final_weights_are_damaged(run: Run) -> None:
    # Inside a segment there are no sketches, so the weights at that step are all there is to compare with.
    run.resume(3, until=3, close=False)
    assert dualform.open(run.path).certificate().exact
    flip(run.path / "final.safetensors", 300, 1)
    assert verify(run.path).usable == 3
    _, done = repair(run.path)
    assert done == ("final.safetensors was moved to damaged/final.safetensors",)
    memory = dualform.open(run.path)
    assert "cut at step 3" in memory.certificate()[0].reason
    assert (memory.weights()["0.weight"] - run.weights[3]["0.weight"]).abs().max() < 1e-6
    run.resume(3, until=6)
    assert dualform.open(run.path).certificate().exact


def test_leftovers_are_no_part_of_a_memory(run: Run) -> None:
    (run.path / "segments/r000-000004.safetensors.tmp").write_bytes(b"half")
    (run.path / "segments/r000-000009.safetensors").write_bytes(b"never named")
    (run.path / "manifest-r000.json.tmp").write_bytes(b"half")
    assert verify(run.path).ok
    assert repair(run.path)[1] == ()
    assert (run.path / "segments/r000-000009.safetensors").exists()
