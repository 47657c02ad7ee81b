"""The commit protocol, at every operation: whatever stops or fails there, the memory is its last commit."""

import copy
import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dualform
from dualform.errors import BadMemory, EmptyMemory, MemoryInUse, RecordingFailed
from dualform.memory import files as memory_files
from dualform.memory import writer
from dualform.memory.arena import Staging
from dualform.memory.disk import Disk, disk
from dualform.memory.manifest import MANIFEST
from dualform.recording.stretch import Stretch
from faults import (
    COLUMNS,
    STEPS,
    Fault,
    Log,
    Stopped,
    batch,
    compiled,
    contents,
    differences,
    distance,
    dying,
    faulty,
    files,
    hooks_of,
    loaded,
    system_error,
    trained,
)

FULL, READ_ONLY, BROKEN = ERRORS = [system_error(code) for code in (errno.ENOSPC, errno.EROFS, errno.EIO)]


@dataclass(frozen=True)
class Layout:
    """How a run is written: past the page cache or not; committed by hand, or from arenas every two steps.

    `compiled` runs are of fp32, and gathered as long ones are.
    """

    direct: bool
    arenas: bool = False
    compiled: bool = False
    rows: int = 5
    steps: int = 6
    commits: tuple[int, ...] = (2, 3, 5)

    @property
    def short(self) -> "Layout":
        return (
            dataclasses.replace(self, steps=6, commits=(4,))
            if self.compiled
            else dataclasses.replace(self, steps=4, commits=(2,))
        )

    def schedule(self, since: int = 0) -> list[int]:
        """The steps of every manifest of an undisturbed run: when it begins, at its commits and when it ends."""
        commits = range(since + 2, self.steps, 2) if self.arenas else (at for at in self.commits if at > since)
        return [since, *commits, self.steps, self.steps]

    def train(
        self, path: Path, run: tuple[nn.Module, torch.optim.Optimizer], since: int, made: list[int], **options: Any
    ) -> None:
        """Record the run from `since` to its end; `made` are the steps so far."""
        model, optimizer = run
        with dualform.record(model, optimizer, path, examples=COLUMNS, **options) as recorder:
            made.append(since)
            commits = () if self.arenas else self.commits
            made.extend(trained(model, optimizer, recorder, since, self.steps, commits, self.rows))

    def begin(self, path: Path) -> None:
        """Record the whole run."""
        self.train(path, self.loaded(0), 0, [], on_error="raise")

    def go_on(self, path: Path, since: int) -> None:
        """Resume the run."""
        self.train(path, self.loaded(since), since, [], resume_at=since, on_error="raise")

    def loaded(self, step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        return loaded(step, self.rows, torch.float32 if self.compiled else torch.float64)


DIRECT, CACHED, ARENAS = Layout(direct=True), Layout(direct=False), Layout(direct=True, arenas=True, rows=70)
COMPILED = Layout(direct=True, compiled=True, rows=70, steps=9, commits=(4, 5, 8))


def name_of(value: object) -> str | None:
    names = {DIRECT: "direct", CACHED: "cached", ARENAS: "arenas", COMPILED: "compiled"}
    return names.get(value) if isinstance(value, Layout) else None


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync has no effect that a test could see, and the shapes are checked in all other tests."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Layout], None]:
    def use(layout: Layout) -> None:
        monkeypatch.setattr(disk, "direct", layout.direct and disk.direct)
        if layout.arenas:
            monkeypatch.setattr(memory_files, "LARGE", 4096)
            monkeypatch.setattr(writer, "COMMIT_BYTES", layout.rows * (6 + 8 + 8 + 4 + 4) * 8 + 1)  # beyond one step
        if layout.compiled:
            pytest.importorskip("numba")
            monkeypatch.setattr(memory_files, "LARGE", 4096)
            compiled(monkeypatch)

    return use


class Judge:
    """Says of a directory that a run has left whether it is in order, and whether the run can be gone on with.

    What was judged once is not judged again: many operations leave the same, but for what is in unfinished files.
    """

    def __init__(self, layout: Layout, undisturbed: Path) -> None:
        self._layout = layout
        self._undisturbed = contents(dualform.open(undisturbed))
        self._judged: set[Any] = set()

    def judge(self, path: Path, steps: int | None) -> None:
        """The memory has exactly these steps; None where nothing was ever committed."""
        state = (steps, frozenset(map(_told_apart, files(path).items())))
        if state in self._judged:
            return
        self._judged.add(state)
        if steps is None:
            with pytest.raises(EmptyMemory if path.exists() else BadMemory):
                dualform.open(path)
            self._layout.begin(path)
        else:
            self._in_order(path, steps)
            self._layout.go_on(path, steps)
        self._in_order(path, self._layout.steps)
        assert differences(dualform.open(path), self._undisturbed) == []
        assert not list(path.rglob("*.tmp"))

    def _in_order(self, path: Path, steps: int) -> None:
        memory = dualform.open(path)
        assert memory.steps == steps
        assert memory.verify().ok
        assert distance(memory.weights(until=steps), steps, self._layout.rows) < (
            1e-6 if self._layout.compiled else 1e-12
        )
        if steps and not memory.certificate().exact:
            # A resumed run died before it had stored any weights of the step at which it went on.
            assert all("the run was cut" in row.reason for row in memory.certificate())


def _told_apart(file: tuple[str, bytes]) -> tuple[str, bytes | str]:
    name, content = file
    if name == MANIFEST:
        body = json.loads(content)
        return name, json.dumps({key: body[key] for key in body if key not in ("checksum", "id", "created")})
    return name, b"" if name.endswith(".tmp") else content


def undisturbed(layout: Layout, path: Path) -> tuple[Log, Judge]:
    """The operations of a run that nothing disturbs, and a judge who compares others with it."""
    with faulty() as log:
        layout.begin(path)
    assert log.renamed == len(layout.schedule())
    return log, Judge(layout, path)


def some(log: Log, kind: str = "") -> list[int]:
    """The operations, but of many writes one after another only the first, the second and the last."""
    names = ["", *log.operations, "", ""]
    inner = [at for at in range(3, len(names) - 2) if names[at - 2 : at + 2] == ["write"] * 4]
    return [at for at in range(1, len(names) - 2) if at not in inner and names[at].startswith(kind)]


def test_a_compiled_run_is_gathered_as_long_ones_are(
    tmp_path: Path, use: Callable[[Layout], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests of such runs below would be of others."""
    stretches: list[int] = []
    arenas: list[bool] = []
    judge, turn = Stretch.judge, Staging.turn
    monkeypatch.setattr(Stretch, "judge", lambda self, swift: stretches.append(len(self.steps)) or judge(self, swift))
    monkeypatch.setattr(Staging, "turn", lambda self: arenas.append(self.bytes > 0) or turn(self))
    use(COMPILED)
    COMPILED.begin(tmp_path / "run")
    assert stretches == [3, 3]
    assert arenas == [True] * 4


@pytest.mark.parametrize("layout", [DIRECT, CACHED, ARENAS, COMPILED], ids=name_of)
def test_whenever_the_process_dies_the_memory_is_its_last_commit(
    layout: Layout, tmp_path: Path, use: Callable[[Layout], None]
) -> None:
    use(layout)
    made: list[int] = []
    with dying(tmp_path / "run", tmp_path / "deaths", made) as deaths:
        layout.train(tmp_path / "run", layout.loaded(0), 0, made, on_error="raise")
    judge = Judge(layout, tmp_path / "run")
    assert max(death.manifests for death in deaths) == len(layout.schedule())
    for death in deaths:
        steps = layout.schedule()[death.manifests - 1] if death.manifests else None
        judge.judge(death.path, steps)
        if death.step >= 0 and not layout.arenas:  # whatever the training went on from is durable
            assert steps is not None
            assert steps >= max((step for step in layout.commits if step < death.step), default=0)


@pytest.mark.parametrize("layout", [DIRECT, CACHED, ARENAS, COMPILED], ids=name_of)
def test_whenever_a_resumed_run_dies_nothing_is_lost_that_it_kept(
    layout: Layout, tmp_path: Path, use: Callable[[Layout], None]
) -> None:
    use(layout)
    layout.begin(tmp_path / "run")
    judge = Judge(layout, tmp_path / "run")
    since, made = 3 if layout.arenas else 7 if layout.compiled else 4, list[int]()  # inside a segment
    with dying(tmp_path / "run", tmp_path / "deaths", made) as deaths:
        layout.train(tmp_path / "run", layout.loaded(since), since, made, resume_at=since, on_error="raise")
    cuts = max(death.manifests for death in deaths if death.step < 0)
    schedule = [layout.steps, *[since] * cuts, *layout.schedule(since)[1:]]
    for death in deaths:
        judge.judge(death.path, schedule[death.manifests])


def test_a_process_that_stops_leaves_no_hook_and_changes_nothing_more(tmp_path: Path) -> None:
    layout = DIRECT.short
    clean, judge = undisturbed(layout, tmp_path / "undisturbed")
    for at in some(clean):
        run, path = layout.loaded(0), tmp_path / f"{at}"
        with faulty(Fault(at, Stopped)) as log, pytest.raises(Stopped):
            layout.train(path, run, 0, [])
        assert hooks_of(*run) == 0
        assert len(log.operations) <= at + 2
        judge.judge(path, layout.schedule()[log.renamed - 1] if log.renamed else None)


FAILURES: dict[str, Callable[[int], Fault]] = {
    "fails once": lambda at: Fault(at, ERRORS[at % 3], once=True),
    "fails for ever": lambda at: Fault(at, ERRORS[(at + 1) % 3]),
    "tears once": lambda at: Fault(at, FULL, once=True, torn=True),
    "tears for ever": lambda at: Fault(at, FULL, torn=True),
    "has no memory once": lambda at: Fault(at, MemoryError, once=True),
}
DISTURBED = [
    *((DIRECT, kind) for kind in FAILURES),
    (CACHED, "fails once"),
    (ARENAS, "fails once"),
    (ARENAS, "fails for ever"),
    (ARENAS, "has no memory once"),
    (COMPILED, "fails once"),
    (COMPILED, "fails for ever"),
]


@pytest.mark.parametrize("layout, kind", DISTURBED, ids=name_of)
def test_a_disk_that_fails_is_told_once_and_training_goes_on(
    layout: Layout, kind: str, tmp_path: Path, use: Callable[[Layout], None], caplog: pytest.LogCaptureFixture
) -> None:
    use(layout)
    layout = layout.short
    clean, judge = undisturbed(layout, tmp_path / "undisturbed")
    for at in some(clean, "write" if "tears" in kind else ""):
        fault, path = FAILURES[kind](at), tmp_path / f"{at}"
        run, made = layout.loaded(0), list[int]()
        caplog.clear()
        with faulty(fault) as log:
            try:
                layout.train(path, run, 0, made)
            except (BadMemory, MemoryError):
                assert made == []  # before the first step the user is told by the exception itself
        if log.struck is None:
            # A small piece that happens to lie on a whole page is a write of its own: their number varies a little.
            assert len(log.operations) < at
            continue
        assert hooks_of(*run) == 0
        if kind in ("fails once", "tears once"):
            assert not list(path.rglob("*.tmp"))  # on a full disk its room is needed
        renamed, durable = log.struck
        if made:
            assert distance(run[0].state_dict(), layout.steps, layout.rows) == 0.0
            told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
            assert "Training goes on unrecorded" in told[0]
            assert all("cannot be written either" in second and not fault.once for second in told[1:])
            failure = dualform.open(path).manifest.failure
            assert failure == told[0] if fault.once else failure is None
        committed = durable if made and fault.once else renamed
        judge.judge(path, layout.schedule()[committed - 1] if committed else None)


def test_with_on_error_raise_a_disk_that_fails_stops_the_training(tmp_path: Path) -> None:
    layout = DIRECT.short
    clean, judge = undisturbed(layout, tmp_path / "undisturbed")
    for at in some(clean):
        path, run, made = tmp_path / f"{at}", layout.loaded(0), list[int]()
        with (
            faulty(FAILURES["fails once"](at)) as log,
            pytest.raises((RecordingFailed, BadMemory)) as raised,
        ):
            layout.train(path, run, 0, made, on_error="raise")
        assert log.struck is not None
        assert hooks_of(*run) == 0
        assert not made or raised.type is RecordingFailed
        committed = log.struck[1] if made else log.struck[0]
        judge.judge(path, layout.schedule()[committed - 1] if committed else None)


@pytest.mark.parametrize("kind", ["fails once", "fails for ever"])
def test_a_disk_that_fails_while_a_run_is_resumed_loses_nothing(kind: str, tmp_path: Path) -> None:
    layout, since = DIRECT, 4
    layout.begin(tmp_path / "run")
    judge = Judge(layout, tmp_path / "run")

    def resume(path: Path, fault: Fault | None) -> Log:
        shutil.copytree(tmp_path / "run", path)
        run = layout.loaded(since)
        recorder = dualform.record(*run, path, resume_at=since)
        with faulty(fault) as log:
            if fault is None:
                recorder.start()
            else:
                with pytest.raises(BadMemory, match="cannot"):
                    recorder.start()
                assert hooks_of(*run) == 0
        recorder.close()
        return log

    operations = len(resume(tmp_path / "undisturbed", None).operations)
    for at in range(1, operations + 1):
        log = resume(tmp_path / f"{at}", FAILURES[kind](at))
        judge.judge(tmp_path / f"{at}", since if log.renamed else layout.steps)


@pytest.mark.parametrize("refused", ["create", "write"])
def test_where_direct_writes_are_refused_ordinary_ones_do(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    DIRECT.begin(tmp_path / "undisturbed")
    asked: list[int] = []
    created: list[bool] = []

    def create(path: Path, direct: bool) -> int:
        created.append(direct)
        if direct and refused == "create":
            asked.append(len(created))
            raise OSError(errno.EINVAL, "refused")
        return Disk.create(disk, path, False)

    def write(handle: int, data: memoryview) -> None:
        if created[-1] and refused == "write":
            asked.append(len(created))
            os.write(handle, data[:100])
            raise OSError(errno.EINVAL, "refused")
        Disk.write(disk, handle, data)

    monkeypatch.setattr(disk, "direct", True)
    monkeypatch.setattr(disk, "create", create)
    monkeypatch.setattr(disk, "write", write)
    caplog.set_level(logging.INFO, "dualform")
    DIRECT.begin(tmp_path / "run")
    assert len(asked) == 1  # and never again
    assert disk.direct is False
    assert caplog.text.count("direct writes are refused here") == 1
    assert differences(dualform.open(tmp_path / "run"), contents(dualform.open(tmp_path / "undisturbed"))) == []


def test_a_directory_that_vanishes_stops_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = loaded(0)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in trained(model, optimizer, recorder, commits=(2, 4)):
            if step == 3:
                shutil.rmtree(tmp_path / "run")
            assert (hooks_of(model, optimizer) == 0) == (step > 4)
    assert distance(model.state_dict(), STEPS) == 0.0
    assert caplog.text.count("Training goes on unrecorded; the memory is valid up to step 2") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_directory_that_may_not_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "above").mkdir(mode=0o555)
    with pytest.raises(BadMemory, match="cannot make the directory .*run"):
        dualform.record(*loaded(0), tmp_path / "above/run").start()


def test_a_read_only_file_system_is_told_before_training(tmp_path: Path) -> None:
    with faulty(Fault(1, READ_ONLY)), pytest.raises(BadMemory, match="cannot make the directory .*run: Read-only"):
        dualform.record(*loaded(0), tmp_path / "run").start()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def interrupted(place: str, recorder: dualform.Recorder, run: tuple[nn.Sequential, torch.optim.SGD]) -> None:
    """Begin a step, and be interrupted at some place of it."""
    model, optimizer = run
    ids, x, y = batch(4)
    with recorder.batch(ids):
        if place == "before the forward pass":
            interrupt()
        output = model(x)
        if place == "between the passes":
            interrupt()
        if place == "in the backward pass":
            output.register_hook(interrupt)
        F.cross_entropy(output, y).backward()
        if place == "after the passes":
            interrupt()
    handle = optimizer.register_step_pre_hook(interrupt)
    try:
        optimizer.step()
    finally:
        handle.remove()


PLACES = ["before the forward pass", "between the passes", "in the backward pass", "after the passes", "in the step"]


@pytest.mark.parametrize("on_error", ["tell", "raise"])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_step_is_not_recorded_and_those_before_it_are(
    tmp_path: Path, place: str, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And whatever becomes of the memory, what is raised is what interrupted it."""
    run = loaded(0)
    with (
        pytest.raises(KeyboardInterrupt),
        dualform.record(*run, tmp_path / "run", on_error=on_error) as recorder,
    ):
        list(trained(*run, recorder, until=3, commits=(2,)))
        interrupted(place, recorder, run)
    memory = dualform.open(tmp_path / "run")
    if place == "in the step":  # which may have changed some weights and not others
        assert memory.steps == 2
        assert "step was interrupted" in (memory.manifest.failure or "")
        assert "Traceback" not in caplog.text and "goes on" not in caplog.text
    else:
        assert memory.steps == 3
        assert memory.manifest.failure is None
    assert memory.certificate().exact
    assert hooks_of(*run) == 0


@pytest.mark.parametrize("place", PLACES)
def test_after_an_interrupted_step_training_may_go_on(tmp_path: Path, place: str) -> None:
    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        list(trained(*run, recorder, until=3))
        with pytest.raises(KeyboardInterrupt):
            interrupted(place, recorder, run)
        run[1].zero_grad()
        list(trained(*run, recorder, since=3))
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == STEPS
    assert memory.certificate().exact
    assert distance(memory.weights(), STEPS) < 1e-12


def test_an_exception_of_the_users_is_passed_on_and_the_memory_closed(tmp_path: Path) -> None:
    run = loaded(0)
    with (
        pytest.raises(ZeroDivisionError) as raised,
        dualform.record(*run, tmp_path / "run", on_error="raise") as recorder,
    ):
        for step in trained(*run, recorder):
            step / (step - 4)
    assert raised.value.__context__ is None
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == 4
    assert memory.manifest.final is not None
    assert memory.certificate().exact
    assert hooks_of(*run) == 0


@contextmanager
def forked(child: Callable[[], None]) -> Iterator[int]:
    """A forked process that calls a function and, unless it is killed, ends well only if that returns."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    ended = None
    try:
        yield process
        ended = os.waitpid(process, 0)[1]
    finally:
        if ended is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    assert ended in (0, signal.SIGKILL)


def test_a_forked_child_disturbs_nothing_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    run = loaded(0)
    waits, goes = os.pipe()

    def child() -> None:
        list(trained(*run, recorder, since=3, commits=(4, 5)))
        with recorder.batch(torch.arange(3)):  # of which nothing is told here either
            run[0](torch.ones(2, 6, dtype=torch.float64))
        recorder.close()
        os.read(waits, 1)

    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        list(trained(*run, recorder, until=3, commits=(2,)))
        with forked(child):
            list(trained(*run, recorder, since=3, commits=(5,)))
            recorder.close()
            with dualform.record(*run, tmp_path / "run", resume_at=STEPS):
                pass  # though the child lives on
            os.write(goes, b"!")
    os.close(waits)
    os.close(goes)
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == STEPS
    assert memory.verify().ok
    assert memory.certificate().exact
    assert distance(memory.weights(), STEPS) < 1e-12


def test_a_data_loader_with_a_worker_disturbs_nothing_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    run = model, optimizer = loaded(0)
    steps = [batch(step) for step in range(1, STEPS + 1)]
    worker = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    loader: Any = DataLoader(steps, batch_size=None, **worker)  # type: ignore[arg-type]
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        for ids, x, y in loader:
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with dualform.record(*run, tmp_path / "run", resume_at=STEPS):
        pass  # though the worker lives on
    memory = dualform.open(tmp_path / "run")
    assert memory.steps == STEPS
    assert memory.certificate().exact
    assert distance(memory.weights(), STEPS) < 1e-12


def test_nothing_of_a_copy_of_the_model_is_recorded(tmp_path: Path) -> None:
    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        for _ in trained(*run, recorder):
            copied = copy.deepcopy(run[0])
            list(trained(copied, torch.optim.SGD(copied.parameters(), lr=0.1), until=1))
            both = copy.deepcopy(run)
            list(trained(*both, until=1))
    DIRECT.begin(tmp_path / "undisturbed")
    expected = contents(dualform.open(tmp_path / "undisturbed"))
    assert set(differences(dualform.open(tmp_path / "run"), expected)) == {"column label"}


def test_a_second_writer_is_refused_and_the_first_undisturbed(tmp_path: Path) -> None:
    run = loaded(0)

    def second() -> None:
        for resume_at in (None, 0, 2):
            other = loaded(2)
            with pytest.raises(MemoryInUse, match=f"process {first} on .*Wait until it is closed"):
                dualform.record(*other, tmp_path / "run", resume_at=resume_at).start()
            assert hooks_of(*other) == 0

    first = os.getpid()
    with dualform.record(*run, tmp_path / "run", on_error="raise", examples=COLUMNS) as recorder:
        list(trained(*run, recorder, until=2, commits=(2,)))
        second()
        with forked(second):
            pass
        list(trained(*run, recorder, since=2))
    DIRECT.begin(tmp_path / "undisturbed")
    assert differences(dualform.open(tmp_path / "run"), contents(dualform.open(tmp_path / "undisturbed"))) == []


def test_after_the_writer_is_killed_another_may_go_on(tmp_path: Path) -> None:
    ready, say = os.pipe()

    def writes() -> None:
        run = loaded(0)
        recorder = dualform.record(*run, tmp_path / "run", examples=COLUMNS).start()
        list(trained(*run, recorder, until=4, commits=(3,)))
        os.write(say, b"!")
        time.sleep(60)

    with forked(writes) as process:
        os.read(ready, 1)
        with pytest.raises(MemoryInUse, match=f"process {process}"):
            DIRECT.go_on(tmp_path / "run", 3)
        os.kill(process, signal.SIGKILL)
    os.close(ready)
    os.close(say)
    DIRECT.go_on(tmp_path / "run", 3)
    DIRECT.begin(tmp_path / "undisturbed")
    assert differences(dualform.open(tmp_path / "run"), contents(dualform.open(tmp_path / "undisturbed"))) == []


def test_a_memory_that_is_open_stays_as_it_is_while_it_is_written(tmp_path: Path) -> None:
    run = loaded(0)
    opened: dict[int, tuple[dualform.Memory, dict[str, Any]]] = {}
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        for step in trained(*run, recorder, commits=range(1, STEPS)):
            memory = dualform.open(tmp_path / "run")
            assert memory.steps == step - 1
            if step in (2, 4):
                opened[step] = memory, contents(memory)
    run = loaded(1)
    with dualform.record(*run, tmp_path / "run", resume_at=1, on_error="raise") as recorder:
        list(trained(*run, recorder, since=1, commits=(3,)))
        for step, (memory, before) in opened.items():
            assert differences(memory, before) == []
            assert memory.certificate().exact
            assert distance(memory.weights(), step - 1) < 1e-12


def test_training_waits_for_a_slow_disk_and_keeps_no_more_than_two_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "COMMIT_BYTES", 1)
    write = disk.write

    def slowly(handle: int, data: memoryview) -> None:
        time.sleep(0.01)
        write(handle, data)

    monkeypatch.setattr(disk, "write", slowly)
    run = loaded(0)
    with dualform.record(*run, tmp_path / "run", on_error="raise") as recorder:
        assert recorder._writer is not None
        for step in trained(*run, recorder):
            assert step - recorder._writer.manifest.steps <= 2
    assert recorder._writer.waited > 0.01
    memory = dualform.open(tmp_path / "run")
    assert len(memory.manifest.segments) == STEPS
    assert memory.certificate().exact


def test_two_recorders_at_once_do_not_mix_their_memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, both = disk.write, threading.Barrier(2)

    def at_once(handle: int, data: memoryview) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=1)
        write(handle, data)

    recorders: dict[int, dualform.Recorder] = {}
    for rows in (5, 7):
        run = loaded(0, rows)
        recorders[rows] = dualform.record(*run, tmp_path / f"{rows}", on_error="raise").start()
        list(trained(*run, recorders[rows], rows=rows))
    monkeypatch.setattr(disk, "write", at_once)
    threads = [threading.Thread(target=recorder.commit) for recorder in recorders.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    for rows, recorder in recorders.items():
        recorder.close()
        memory = dualform.open(tmp_path / f"{rows}")
        assert memory.verify().ok
        assert distance(memory.weights(), STEPS, rows) < 1e-12


@pytest.mark.parametrize("fails", [False, True], ids=["writes", "fails"])
def test_an_interrupt_while_training_waits_for_the_disk_spoils_nothing(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Layout], None]
) -> None:
    use(ARENAS)
    write, released = disk.write, threading.Event()
    interrupts, result = list[bool](), Future.result

    def blocked(handle: int, data: memoryview) -> None:
        if not released.is_set():
            released.wait(10)
            if fails:
                raise FULL()
        write(handle, data)

    def interrupted_once(future: "Future[None]", timeout: float | None = None) -> None:
        if not interrupts:
            interrupts.append(True)
            raise KeyboardInterrupt
        return result(future, timeout)

    run = ARENAS.loaded(0)
    recorder = dualform.record(*run, tmp_path / "run").start()
    monkeypatch.setattr(disk, "write", blocked)
    monkeypatch.setattr(Future, "result", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        list(trained(*run, recorder, rows=ARENAS.rows))
    run[1].zero_grad()
    threading.Timer(0.3, released.set).start()
    list(trained(*run, recorder, since=4, rows=ARENAS.rows))
    recorder.close()
    assert distance(run[0].state_dict(), STEPS, ARENAS.rows) == 0.0
    memory = dualform.open(tmp_path / "run")
    assert memory.verify().ok
    assert memory.steps == (0 if fails else STEPS)
    assert distance(memory.weights(), memory.steps, ARENAS.rows) < 1e-12


def test_a_lock_that_could_not_be_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise FULL()

    with monkeypatch.context() as patch, pytest.raises((BadMemory, OSError)):
        patch.setattr(os, "pwrite", full)
        dualform.record(*loaded(0), tmp_path / "run").start()
    DIRECT.begin(tmp_path / "run")  # there is room again
