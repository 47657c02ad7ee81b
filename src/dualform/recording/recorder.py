"""The recorder: follows a training loop step by step and hands every step to the writer."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dualform.errors import BadCall, BadMemory, DualformError, RecordingFailed
from dualform.memory import Column, StepRows, Writer
from dualform.memory.columns import write_column
from dualform.memory.directory import clear_leftovers, is_unused, make_directory
from dualform.memory.files import FileRecord, tensor_hash, write_tensors
from dualform.memory.ledger import Ledger
from dualform.memory.lock import Lock
from dualform.memory.manifest import write_manifest
from dualform.memory.segment import sketch_tensors
from dualform.memory.slab import Slab
from dualform.optimizers import is_nested
from dualform.recording.capture import Capture
from dualform.recording.description import describe, final_tensors, initial_tensors
from dualform.recording.ids import Batch, read_ids
from dualform.recording.plain import run_plain
from dualform.recording.resume import resumed_memory
from dualform.recording.stepping import Stepping
from dualform.recording.targets import Layers, find_targets

logger = logging.getLogger("dualform")
KEEP = ("all", "keys")


class Recorder:
    """Records a training run; made by `dualform.record`, used as a context manager or by start() and close()."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        path: Path,
        columns: Sequence[Column],
        layers: Layers,
        keep: str,
        resume_at: int | None,
        recipe: str | None,
        on_error: str,
    ) -> None:
        self.path = path
        self._optimizers = optimizers
        self._columns = columns
        self._keep, self._resume_at, self._recipe, self._on_error = keep, resume_at, recipe, on_error
        self._targets = find_targets(model, layers, seed=0x0D0A1F)
        self._examples = len(columns[0]) if columns else None
        self._slab = Slab()
        self._told: dict[str, str] = {}
        self._told_before: tuple[str, ...] = ()
        self._handles: list[Any] = []
        self._writer: Writer | None = None
        self._lock: Lock | None = None
        self._failure: str | None = None
        self._closed = self._interrupted = False
        self._between_steps = True
        self._estimated = False
        self._pid = os.getpid()
        self._capture = Capture(
            self._targets,
            self._shield,
            self._failed,
            self._tell,
            wanted=lambda target: self._stepping.owns(target),
            catch_up=lambda: self._stepping.catch_up(),
            values=keep == "all",
        )
        self._stepping = Stepping(
            self._targets, optimizers, self._tell, self._capture, self._emit, self._slab, values=keep == "all"
        )

    def start(self) -> Recorder:
        """Read the initial weights, commit step 0, and put the hooks on."""
        if self._writer is not None:
            raise BadCall("this recorder was started already; call dualform.record again for another run.")
        make_directory(self.path)
        self._lock = Lock(self.path)
        try:
            resumed = self._resume_at is not None and not (self._resume_at == 0 and is_unused(self.path))
            if not resumed:
                clear_leftovers(self.path)
            self._install_hooks()
            self._writer = run_plain(self._resume if resumed else self._begin)
            self._capture.staging = self._writer.staging
        except BaseException as error:
            self._remove_hooks()
            self._lock.release()
            if isinstance(error, OSError):
                raise BadMemory(f"cannot record into {self.path}: {error.strerror or error}.") from error
            raise
        for note in self._targets.notes:
            self._tell(note, note)
        return self

    def _begin(self) -> Writer:
        for column in self._columns:
            write_column(self.path, column)
        self._stepping.start()
        record = write_tensors(self.path, "initial.safetensors", initial_tensors(self._targets, self._stepping))
        manifest = describe(self._targets, self._stepping, self._optimizers, self._keep, self._recipe, record)
        write_manifest(self.path, manifest)
        return Writer(self.path, manifest, [Ledger() for _ in manifest.weights])

    def _resume(self) -> Writer:
        assert self._resume_at is not None
        blank = describe(
            self._targets, self._stepping, self._optimizers, self._keep, self._recipe, FileRecord("", 0, ())
        )
        memory = resumed_memory(self.path, self._resume_at, blank, self._targets, self._stepping, self._columns)
        if not self._columns and memory.columns:
            self._examples = len(memory.column(memory.columns[0]))
        for column in self._columns:
            write_column(self.path, column)
        self._stepping.start(memory.steps, memory.manifest.findings)
        self._capture.backwards = memory.journal.backwards
        self._told_before = memory.manifest.told
        counts = memory.manifest.segments[-1].next_keys if memory.manifest.segments else (0,) * len(blank.weights)
        ledgers = [Ledger(count, partial(memory.stored_keys, at)) for at, count in enumerate(counts)]
        return Writer(self.path, memory.manifest, ledgers)

    def _install_hooks(self) -> None:
        self._capture.install()
        for index, optimizer in enumerate(self._optimizers):
            before, after = (partial(self._shield, f, index) for f in (self._before_step, self._after_step))
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))

    def batch(self, ids: Any, dim: int = 0) -> contextlib.AbstractContextManager[None]:
        """Say which example each row of this batch is, for the forward passes inside.

        with recorder.batch(ids):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        """
        if self._writer is None:
            raise BadCall("this recorder was not started: use `with dualform.record(…) as recorder:`, or start().")
        if not isinstance(dim, int) or dim < 0:
            raise BadCall(f"dim must be the number of the batch dimension, 0 or larger, not {dim!r}.")
        return Batch(self._capture, read_ids(ids, self._examples, self._slab, self._targets.swift.loops), dim)

    def commit(self) -> None:
        """Make every finished step durable now; call it before saving a checkpoint."""
        if self._writer is None:
            raise BadCall("recorder.commit() before recorder.start(): there is nothing to commit to.")
        if self._closed:
            raise BadCall("recorder.commit() after recorder.close(): the memory is finished.")
        self._guard(self._commit, True)

    def close(self) -> None:
        """Commit what is left, store the final weights, and take every hook off."""
        self._remove_hooks()
        if self._writer is not None and not self._closed:
            self._closed = True
            try:
                self._guard(self._finish)
            finally:
                self._release()

    def _release(self) -> None:
        """Let another writer in; in a forked child the lock is the parent's."""
        if self._lock is not None and os.getpid() == self._pid:
            self._lock.release()

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupted = error is not None
        try:
            self.close()
        except RecordingFailed:
            if error is None:
                raise
            # What ended the block is raised; that the memory could not be finished is logged, and in its manifest.

    def __repr__(self) -> str:
        steps = self._stepping.steps
        return f"Recorder({str(self.path)!r}, {len(self._targets.weights)} weights, {steps} steps so far)"

    def _guard(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of the recorder that computes; whatever fails there stops the recording, never the training."""
        return self._shield(run_plain, function, *arguments)

    def _shield(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._failure is not None or os.getpid() != self._pid:
            return None  # stopped, or in a forked child, which records nothing
        try:
            return function(*arguments)
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        """A part of the recorder has failed: stop the recording, and the training only where that was asked for."""
        if os.getpid() != self._pid:
            return  # a forked child records nothing, and the memory is its parent's
        if self._failure is None:
            self._fail(error)
        if self._on_error == "raise":
            raise RecordingFailed(self._failure or "") from error

    def _fail(self, error: Exception) -> None:
        healthy = self._writer is not None and not self._writer.broken
        if healthy and self._between_steps and not isinstance(error, OSError):
            with contextlib.suppress(Exception):
                self._commit(True)  # what was finished before is worth keeping
        committed = self._writer.stop() if self._writer else 0
        what = str(error) if isinstance(error, DualformError) else f"{type(error).__name__}: {error}"
        after = "The" if self._interrupted else "Training goes on unrecorded; the"
        self._failure = (
            f"recording stopped after step {self._stepping.steps}: {what}. "
            f"{after} memory is valid up to step {committed}."
        )
        logger.error("%s", self._failure, exc_info=None if isinstance(error, DualformError) else error)
        self._remove_hooks()
        if self._writer is not None:
            try:
                self._writer.fail(self._failure)
            except OSError as second:
                logger.error("the manifest of %s cannot be written either: %s", self.path, second)
            self._release()

    def _remove_hooks(self) -> None:
        self._capture.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _tell(self, key: str, message: str) -> None:
        """Tell once, through the logger and in the manifest."""
        if key not in self._told:
            self._told[key] = message
            if message not in self._told_before:
                logger.warning("%s", message)

    def _before_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._stepping.linear[index] and is_nested(optimizer):
            return None
        if not self._between_steps:
            self._must_not_be_cut()
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            self._stepping.prepare(index)
            self._between_steps = False
            return None
        self._between_steps = False

        def probed() -> Any:
            # The gradients that the step uses exist only after the closure has run.
            loss = closure()
            self._shield(self._stepping.prepare, index)
            return loss

        if len(args) < 2:
            return args, {**kwargs, "closure": probed}
        return (args[0], probed, *args[2:]), kwargs

    def _after_step(self, index: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self._writer is not None
        if not self._stepping.linear[index] and is_nested(optimizer):
            return
        if self._capture.unfinished:
            self._capture.forget_unfinished()
        self._stepping.finish(index, self._targets.others())
        self._between_steps = True  # an interrupt from here on loses no step
        self._stepping.flush_when_due()
        if not self._estimated:
            self._estimate()
        if self._writer.due(self._stepping.steps):
            run_plain(self._commit, False)

    def _emit(self, rows: StepRows) -> None:
        assert self._writer is not None
        self._writer.append(rows)

    def _estimate(self) -> None:
        assert self._writer is not None
        self._estimated = True
        size = self._writer.gathered
        free = shutil.disk_usage(self.path).free
        logger.info(
            "recording to %s: the first step took %.2f MB; 1,000 like it take %.2f GB; %.1f GB are free",
            self.path, size / 1e6, size / 1e6, free / 1e9,
        )  # fmt: skip
        if size * 1000 > free:
            logger.warning("%s has room for about %d steps like the first", self.path, free // max(size, 1))

    def _must_not_be_cut(self) -> None:
        """A step that failed may be made again; one that was cut off in the midst of the weights may not."""
        if self._stepping.moved:
            raise RecordingFailed("an optimiser's step was interrupted, so the weights are those of no step")

    def _commit(self, wait: bool) -> None:
        assert self._writer is not None
        if not self._between_steps:
            self._must_not_be_cut()
        sketches, velocities = self._stepping.check_all()
        if self._writer.steps != self._stepping.steps:
            raise RecordingFailed("an interrupt came while finished steps were worked out, and some of them are lost")
        hashes = [tensor_hash(target.parameter) for target in self._targets.parameters]
        extra = sketch_tensors(sketches, velocities, hashes)
        extra |= {f"other/{name}": [place.current().clone()] for name, place in self._targets.at_commits.items()}
        self._capture.leave_arena()
        told = dict.fromkeys([*self._told_before, *self._told.values()])
        self._writer.commit(extra, self._stepping.findings, list(told), wait)
        if self._writer.manifest.nonfinite:
            self._tell(
                "nonfinite",
                "some events hold NaN or infinity in their key or gradient; they are recorded, counted, "
                "and set apart in top-k",
            )

    def _finish(self) -> None:
        assert self._writer is not None
        if not self._between_steps:
            raise RecordingFailed("an optimiser's step was interrupted, so the weights are those of no step")
        if self._writer.waited > 1.0:
            logger.info("training waited %.1f s for the disk", self._writer.waited)
        self._commit(True)
        self._writer.close(final_tensors(self._targets))


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    path: str | os.PathLike[str],
    *,
    examples: Mapping[str, Any] | None = None,
    layers: Layers = None,
    keep: str = "all",
    resume_at: int | None = None,
    recipe: str | None = None,
    on_error: str = "tell",
) -> Recorder:
    """Record a training run into the directory `path`; training itself stays bit for bit the same.

    with dualform.record(model, optimizer, "runs/mnist", examples={"label": labels}) as recorder:
        for ids, x, y in loader:
            with recorder.batch(ids):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    `examples` are columns indexed by example id. `layers` chooses layers by glob or by a predicate of name and
    module. `keep` is "all" (keys and gradients) or "keys" (scores only). `resume_at` goes on with a run in `path`
    from a checkpoint of that step, which was loaded into model and optimiser; it drops what came after it.
    `on_error="raise"` lets a failure of the recorder stop the training, too.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizers = [optimizer]
    else:
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else []
    if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise BadCall("optimizer must be a torch optimiser or a list of them.")
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise BadCall("the same optimiser is given twice; every optimiser is recorded once.")
    if not isinstance(model, nn.Module):
        raise BadCall(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if keep not in KEEP:
        raise BadCall(f"keep must be one of {', '.join(map(repr, KEEP))}, not {keep!r}.")
    if on_error not in ("tell", "raise"):
        raise BadCall(f"on_error must be 'tell' or 'raise', not {on_error!r}.")
    if resume_at is not None and (isinstance(resume_at, bool) or not isinstance(resume_at, int) or resume_at < 0):
        raise BadCall(f"resume_at must be the number of a step, 0 or larger, not {resume_at!r}.")
    if recipe is not None and not isinstance(recipe, str):
        raise BadCall(f"recipe must be a name, not {recipe!r}.")
    if examples is not None and not hasattr(examples, "items"):
        raise BadCall("examples maps names of columns to arrays indexed by example id.")
    columns = [Column.of(name, array) for name, array in (examples.items() if examples is not None else ())]
    lengths = {column.name: len(column) for column in columns}
    if len(set(lengths.values())) > 1:
        raise BadCall(f"all columns of examples need one entry per example id; their lengths differ: {lengths}.")
    return Recorder(model, optimizers, Path(path).absolute(), columns, layers, keep, resume_at, recipe, on_error)
