"""The recorder: follows a training loop step by step and hands every step to the writer."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import BadCall, BadIds, DualformError, RecordingFailed
from dualform.memory import Column, Manifest, StepRow, Writer, prepare_directory
from dualform.memory.columns import write_column
from dualform.memory.files import FileRecord, tensor_hash
from dualform.memory.manifest import OptimizerRecord, ParameterRecord, UseRecord, WeightRecord
from dualform.optimizers import is_linear, is_nested
from dualform.recording.capture import Capture
from dualform.recording.ids import Batch, read_ids
from dualform.recording.stepping import Stepping
from dualform.recording.targets import Layers, Target, find_targets

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
        recipe: str | None,
        on_error: str,
    ) -> None:
        self.path = path
        self._optimizers = optimizers
        self._columns = columns
        self._keep, self._recipe, self._on_error = keep, recipe, on_error
        self._targets = find_targets(model, layers, seed=0x0D0A1F)
        self._examples = len(columns[0]) if columns else None
        self._batch: Batch | None = None
        self._told: dict[str, str] = {}
        self._handles: list[Any] = []
        self._writer: Writer | None = None
        self._failure: str | None = None
        self._closed = False
        self._between_steps = True
        self._pid = os.getpid()
        self._capture = Capture(
            self._targets, self._guard, self._tell, lambda: self._batch, lambda t: self._stepping.owns(t)
        )
        self._stepping = Stepping(self._targets, optimizers, self._tell, self._capture)

    def start(self) -> Recorder:
        """Read the initial weights, commit step 0, and put the hooks on."""
        if self._writer is not None:
            raise BadCall("this recorder was started already; call dualform.record again for another run.")
        prepare_directory(self.path)
        try:
            self._install_hooks()
            with _plain_torch():
                for column in self._columns:
                    write_column(self.path, column)
                self._stepping.start()
                self._writer = Writer(self.path, self._manifest, self._initial())
        except BaseException:
            self._remove_hooks()
            raise
        for note in self._targets.notes:
            self._tell(note, note)
        return self

    def _install_hooks(self) -> None:
        self._capture.install()
        for index, optimizer in enumerate(self._optimizers):
            before = _bound(self._guard, self._before_step, index)
            after = _bound(self._guard, self._after_step, index)
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))

    @contextlib.contextmanager
    def batch(self, ids: Any, dim: int = 0) -> Iterator[None]:
        """Say which example each row of this batch is, for the forward passes inside.

        with recorder.batch(ids):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        """
        if self._writer is None:
            raise BadCall("this recorder was not started: use `with dualform.record(…) as recorder:`, or start().")
        if self._batch is not None:
            raise BadCall("recorder.batch(…) is already open; leave it before the next batch.")
        if not isinstance(dim, int) or dim < 0:
            raise BadCall(f"dim must be the number of the batch dimension, 0 or larger, not {dim!r}.")
        batch = self._batch = Batch(read_ids(ids, self._examples), dim)
        try:
            yield
        finally:
            self._batch = None
            self._capture.forget_unfinished()
        if batch.misfits is not None and not batch.fitted:
            raise BadIds(
                f"ids of shape {list(batch.ids.shape)} fit no recorded layer: inputs have leading dimensions "
                f"{list(batch.misfits)}. Pass one id per row, one per example along dimension {dim}, "
                "or name the batch dimension with recorder.batch(ids, dim=…)."
            )

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
            self._guard(self._finish)
            self._closed = True

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        steps = self._stepping.steps
        return f"Recorder({str(self.path)!r}, {len(self._targets.weights)} weights, {steps} steps so far)"

    def _guard(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of the recorder; whatever fails there stops the recording, never the training."""
        if self._failure is not None or os.getpid() != self._pid:
            return None  # stopped, or in a forked child, which records nothing
        try:
            with _plain_torch():
                return function(*arguments)
        except Exception as error:
            self._fail(error)
            if self._on_error == "raise":
                raise RecordingFailed(self._failure or "") from error
            return None

    def _fail(self, error: Exception) -> None:
        if self._writer is not None and self._between_steps and not isinstance(error, OSError):
            with contextlib.suppress(Exception):
                self._commit(True)  # what was finished before is worth keeping
        committed = self._writer.manifest.steps if self._writer else 0
        what = str(error) if isinstance(error, DualformError) else f"{type(error).__name__}: {error}"
        self._failure = (
            f"recording stopped after step {self._stepping.steps}: {what}. Training goes on unrecorded; "
            f"the memory is valid up to step {committed}."
        )
        logger.error("%s", self._failure, exc_info=error)
        self._remove_hooks()
        if self._writer is not None:
            try:
                self._writer.fail(self._failure)
            except OSError as second:
                logger.error("the manifest of %s cannot be written either: %s", self.path, second)

    def _remove_hooks(self) -> None:
        self._capture.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _tell(self, key: str, message: str) -> None:
        """Tell once, through the logger and in the manifest."""
        if key not in self._told:
            self._told[key] = message
            logger.warning("%s", message)

    def _before_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if is_nested(optimizer):
            return None
        self._between_steps = False
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            self._stepping.prepare(index)
            return None

        def probed() -> Any:
            # The gradients that the step uses exist only after the closure has run.
            loss = closure()
            self._guard(self._stepping.prepare, index)
            return loss

        if len(args) < 2:
            return args, {**kwargs, "closure": probed}
        return (args[0], probed, *args[2:]), kwargs

    def _after_step(self, index: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self._writer is not None
        if is_nested(optimizer):
            return
        row = self._stepping.finish(index)
        self._capture.forget_unfinished()
        row.others = {name: place.current().clone() for name, place in self._targets.every_step.items()}
        self._writer.append(row)
        if self._stepping.steps == 1:
            self._estimate(row)
        self._between_steps = True
        if self._writer.due:
            self._commit(False)

    def _estimate(self, row: StepRow) -> None:
        calls = [call for group in row.calls.values() for call in group]
        size = sum(
            c.keys.nbytes + c.examples.nbytes + (c.gradients.nbytes if self._keep == "all" else 0) for c in calls
        )
        free = shutil.disk_usage(self.path).free
        logger.info(
            "recording to %s: the first step took %.2f MB; 1,000 like it take %.2f GB; %.1f GB are free",
            self.path, size / 1e6, size / 1e6, free / 1e9,
        )  # fmt: skip
        if size * 1000 > free:
            logger.warning("%s has room for about %d steps like the first", self.path, free // max(size, 1))

    def _commit(self, wait: bool) -> None:
        assert self._writer is not None
        parameters = self._targets.parameters
        self._writer.commit(
            sketches=self._stepping.check_all(),
            hashes=[tensor_hash(target.parameter) for target in parameters],
            others={name: place.current().clone() for name, place in self._targets.at_commits.items()},
            findings=self._stepping.findings,
            told=list(self._told.values()),
            wait=wait,
        )
        if self._writer.manifest.nonfinite:
            self._tell(
                "nonfinite",
                "some events hold NaN or infinity in their key or gradient; they are recorded, counted, "
                "and set apart in top-k",
            )

    def _finish(self) -> None:
        assert self._writer is not None
        if self._writer.waited > 1.0:
            logger.info("training waited %.1f s for the disk", self._writer.waited)
        self._commit(True)
        self._writer.close({f"parameter/{target.name}": target.parameter for target in self._targets.parameters})

    def _initial(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for target in self._targets.parameters:
            tensors[f"parameter/{target.name}"] = target.parameter.detach()
            tensors[f"sketch/{target.index}"] = target.sketch(target.parameter)
            velocity = self._stepping.velocity(target)
            if velocity is not None:
                tensors[f"velocity/{target.name}"] = velocity
            if target.projection is not None:
                tensors[f"probe/{target.index}"] = target.projection
        for name, place in (self._targets.every_step | self._targets.at_commits).items():
            tensors[f"other/{name}"] = place.current()
        return tensors

    def _manifest(self, initial: FileRecord) -> Manifest:
        return Manifest(
            id=uuid.UUID(bytes=os.urandom(16), version=4).hex,
            dualform=importlib.metadata.version("dualform"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            keep=self._keep,
            recipe=self._recipe,
            optimizers=tuple(OptimizerRecord(type(o).__name__, is_linear(o)) for o in self._optimizers),
            parameters=tuple(self._parameter_record(target) for target in self._targets.parameters),
            weights=tuple(self._weight_record(target) for target in self._targets.weights),
            initial=initial,
            every_step=tuple(self._targets.every_step),
            at_commits=tuple(self._targets.at_commits),
        )

    def _parameter_record(self, target: Target) -> ParameterRecord:
        dtype = str(target.parameter.dtype).removeprefix("torch.")
        shape = tuple(target.parameter.shape)
        return ParameterRecord(target.name, tuple(target.names), shape, dtype, self._stepping.owner(target))

    def _weight_record(self, target: Target) -> WeightRecord:
        uses = [use for use in self._targets.uses if use.weight is target]
        dim_out, dim_in = target.parameter.shape
        records = (
            UseRecord(use.map, use.module_name, use.kind.name, use.bias.name if use.bias else None) for use in uses
        )
        return WeightRecord(target.name, dim_in, dim_out, tuple(records))


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """No gradients, no autocast, everything on the CPU: whatever the user's loop has switched on."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def _bound(guard: Callable[..., Any], function: Callable[..., Any], index: int) -> Callable[..., Any]:
    return lambda optimizer, args, kwargs: guard(function, index, optimizer, args, kwargs)


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    path: str | os.PathLike[str],
    *,
    examples: Mapping[str, Any] | None = None,
    layers: Layers = None,
    keep: str = "all",
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
    module. `keep` is "all" (keys and gradients) or "keys" (scores only). `on_error="raise"` lets a failure of
    the recorder stop the training, too.
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
    if recipe is not None and not isinstance(recipe, str):
        raise BadCall(f"recipe must be a name, not {recipe!r}.")
    if examples is not None and not hasattr(examples, "items"):
        raise BadCall("examples maps names of columns to arrays indexed by example id.")
    columns = [Column.of(name, array) for name, array in (examples.items() if examples is not None else ())]
    lengths = {column.name: len(column) for column in columns}
    if len(set(lengths.values())) > 1:
        raise BadCall(f"all columns of examples need one entry per example id; their lengths differ: {lengths}.")
    return Recorder(model, optimizers, Path(path).absolute(), columns, layers, keep, recipe, on_error)
