"""The hooks that turn a backward pass into events, without changing anything in it.

A forward hook puts a tensor hook on the layer's output, which keeps the gradient. When the backward pass has ended,
keys and gradients are copied, and the weights' post-accumulate hooks have said which of them became events: only
where a gradient reached the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor, is_legacy_batchedtensor
from torch.utils.hooks import RemovableHandle

from dualform.errors import BadCall, BadIds
from dualform.memory.arena import Held
from dualform.recording.backward import Backward, Copied, Forward, Known, known
from dualform.recording.ids import NO_EXAMPLE, Batch, Numbers, nowhere
from dualform.recording.plain import run_plain
from dualform.recording.routine import Reserve, Taking
from dualform.recording.targets import Arrived, Pass, Target, Targets, Use

WAITING = 256 << 20  # bytes of gradients that may wait for the end of their backward pass
LATE = 64  # backward passes that wait to be settled
PENDING = 1024  # backward passes that one parameter may gather before a step


def inert(*_: Any) -> None:
    """What a hook becomes in a copy of the model: nothing."""


def _make_inert() -> Callable[..., None]:
    return inert


class _ForwardHook(partial):  # type: ignore[type-arg]
    """A module's forward hook; in a deep copy or a pickle of the model it does nothing."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


class Capture:
    """Installs the hooks, gathers passes in `target.passes`, and removes every hook at the end."""

    def __init__(
        self,
        targets: Targets,
        shield: Callable[..., Any],
        tell: Callable[[str, str], None],
        wanted: Callable[[Target], bool],
        catch_up: Callable[[], None],
        values: bool,
    ) -> None:
        self.shield = shield
        self.hold: Callable[[str, Tensor], Tensor] = lambda stream, rows: rows.clone()
        self.reserve: Reserve = lambda wanted: None
        self.batch: Batch | None = None
        self._tell, self._wanted, self._catch_up, self._values = tell, wanted, catch_up, values
        self._targets = targets
        self._by_parameter = {id(target.parameter): target for target in targets.parameters}
        self._order = 0
        self.backwards = 0
        self._open: dict[int, Backward] = {}
        self._ended_since: list[Backward] = []
        self._routine: Taking | None = None
        self._accumulated: list[Tensor] = []
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Put the hooks on, ours before the user's: a hook that replaces an output must come after."""
        for use in self._targets.uses:
            hook = _ForwardHook(self.shield, self.saw_forward, use)
            self._handles.append(use.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        for target in self._targets.parameters:
            # A frozen parameter takes no such hook, but keeps one it got before.
            frozen = not target.parameter.requires_grad
            target.parameter.requires_grad_(True)
            # A list's own append: what it means is looked at once, when the backward pass has ended.
            handle = target.parameter.register_post_accumulate_grad_hook(self._accumulated.append)
            self._handles.append(handle)
            target.parameter.requires_grad_(not frozen)

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        self._ended_since.clear()
        self._accumulated.clear()

    def saw_forward(
        self, use: Use, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A recorded module was called: wait for its gradient, if one can come."""
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        if not use.weight.parameter.requires_grad and not use.trained:
            return
        stored = args[0] if args else kwargs.get("input")
        if not isinstance(stored, Tensor) or _is_wrapped(output):
            return
        batch, shape = self.batch, stored.shape
        if batch is not None:
            batch.shapes[shape] = use
        call = known((self._order, use, shape, not stored.requires_grad, batch))
        if use.copy_at_forward:
            stored = stored.detach().clone()
        self._order += 1
        forward = call, stored, stored._version
        product = output if output._base is None else _product(output)
        product.register_hook(partial(self._saw_gradient, forward))

    def _saw_gradient(self, forward: Forward, gradient: Tensor | None) -> None:
        # Between two large products the interpreter itself has left the cache, and every line here is slow: so the
        # least possible, and no shield around what cannot fail. No user code runs before the backward pass has ended.
        task = torch._C._current_graph_task_id()
        backward = self._open.get(task) or self.shield(self._begun, task)
        if backward is None or gradient is None:  # recording has stopped, or nothing flows back to this layer
            return
        backward.waiting.append((forward, gradient))
        backward.bytes += gradient.numel() * gradient.itemsize  # `nbytes` raises for a sparse one
        if backward.bytes > WAITING:
            self.shield(run_plain, self._take_in, backward)

    def _begun(self, task: int) -> Backward:
        if not self._open:
            self._accumulated.clear()  # by a pass through none of our layers
        fresh = [target for target in self._targets.parameters if target.parameter.grad is None]
        self._open[task] = Backward(fresh)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self.shield, run_plain, self._ended, task))
        return self._open[task]

    def _take_in(self, backward: Backward) -> None:
        """Copy the keys and gradients that have arrived, and sketch what they put into the parameters."""
        calls: list[Known] = []
        rows: list[tuple[Use, Tensor, Tensor]] = []
        for forward, gradient in backward.waiting:
            if not _is_wrapped(gradient):  # a vectorised Jacobian: nothing accumulates
                calls.append(forward[0])
                rows.append(self._rows(forward, gradient))
        backward.waiting.clear()
        backward.bytes = 0
        if rows and not self._by_routine(backward, calls, rows):
            self._told_of(backward)
            for call, (use, keys, gradients) in zip(calls, rows, strict=True):
                kept = self.hold(use.streams[1], gradients) if self._values else gradients.detach()
                arrived = self._arrived(call, self.hold(use.streams[0], keys), kept)
                arrived.sketch = use.sketch(keys, gradients)
                backward.arrived.append(arrived)

    def _by_routine(self, backward: Backward, calls: list[Known], rows: Sequence[tuple[Use, Tensor, Tensor]]) -> bool:
        """Have compiled loops take in what has arrived; False where they cannot."""
        if self._targets.swift.loops is None:
            return False
        if self._routine is None or not self._routine.matches(rows):
            if not Taking.possible(rows):
                return False
            self._routine = Taking(rows, self._values, self._targets.swift)
        found = self._routine.take(rows, self.reserve)
        if found is None:
            return False
        taken, finite = found
        # Gradients that are not kept are needed once more only to count the events that are not finite.
        needed = [gradients for _, _, gradients in rows] if not finite and not self._values else []
        backward.copied.append(Copied(self._routine, taken, calls, needed))
        return True

    def _told_of(self, backward: Backward) -> None:
        """Make rows that have arrived of what routines have copied."""
        for routine, taken, calls, needed in backward.copied:
            arrived = [self._arrived(call, held, None) for call, held in zip(calls, taken.held, strict=False)]
            routine.tell(taken, arrived)
            for one, gradients in zip(arrived, needed, strict=False):
                one.kept_gradients = gradients
            backward.arrived += arrived
        backward.copied.clear()

    def _arrived(self, call: Known, keys: Tensor | Held, gradients: Tensor | None) -> Arrived:
        examples, positions = self.numbers(call)
        numbers = torch.from_numpy(examples), torch.from_numpy(positions)
        return Arrived(call.order, call.use, keys, gradients, *numbers, call.fixed)

    def _rows(self, forward: Forward, gradient: Tensor) -> tuple[Use, Tensor, Tensor]:
        (_, use, *_), stored, version = forward
        if stored._version != version and not use.copy_at_forward:
            use.copy_at_forward = True
            self._tell(
                f"in-place {use.map}",
                f"{use.map}: its input was changed in place between forward and backward; "
                "from now on it is copied at forward",
            )
        keys, gradients = use.kind.keys(stored), use.kind.gradients(gradient)
        if keys.dtype != gradients.dtype:  # under autocast the product is in the output's dtype: so is the key
            keys = keys.to(gradients.dtype)
        return use, keys, gradients

    def numbers(self, call: Known) -> Numbers:
        """The example and the position of every event of a call."""
        leading = call.use.kind.leading(call.shape)
        numbers = None if call.batch is None else call.batch.fit(leading)
        if numbers is not None:
            return numbers
        if call.batch is not None:
            self._tell(
                f"ids {call.use.map}",
                f"{call.use.map}: ids of shape {list(call.batch.ids.shape)} fit no dimension of its input "
                f"{list(leading)}; its events get example {NO_EXAMPLE}",
            )
        else:
            self._tell("no ids", f"no ids are given (recorder.batch); events get example {NO_EXAMPLE}")
        events = math.prod(leading)
        return np.full(events, NO_EXAMPLE), nowhere(events)

    def _ended(self, task: int) -> None:
        """A backward pass is over: what arrived in it became events where a gradient accumulated."""
        backward = self._open.get(task)
        if backward is not None:
            self._take_in(backward)
            del self._open[task]
            backward.accumulated = self._accumulated[:]
            if self._open:  # a backward pass within another leaves the other's gradients to it
                self._catch_up()
                self._accumulated[:] = self._settle_all(backward)
                return
            self._accumulated.clear()
            self._ended_since.append(backward)
            if len(self._ended_since) >= LATE:
                self._catch_up()

    def begin(self) -> None:
        """Begin a new stretch of steps: what was copied for the last one has been looked at."""
        if self._routine is not None:
            self._routine.ring.begin()

    def ended_since(self) -> list[Backward]:
        """The backward passes that have ended since this was asked last; they are still to be settled."""
        ended, self._ended_since = self._ended_since, []
        return ended

    def settle_all(self, ended: Sequence[Backward]) -> None:
        """Make what arrived in these backward passes events."""
        for backward in ended:
            self._settle_all(backward)

    def _settle_all(self, backward: Backward) -> list[Tensor]:
        """The parameters that took their gradient from elsewhere."""
        self._told_of(backward)
        return [p for p in backward.accumulated if not self._settle(self._by_parameter[id(p)], backward)]

    @property
    def within_backward(self) -> bool:
        """Whether a backward pass through a recorded layer is going on."""
        return bool(self._open)

    def settle(self, target: Target) -> None:
        """An optimiser is about to step this parameter within a backward pass: its gradient is there already."""
        backward = self._open.get(torch._C._current_graph_task_id())
        if backward is not None:
            self._catch_up()
            self._take_in(backward)
            self._told_of(backward)
            self._settle(target, backward)

    def _settle(self, target: Target, backward: Backward) -> bool:
        """Make the rows of a backward pass events of a parameter that took its gradient from it."""
        if target in backward.settled or not self._wanted(target):
            return target in backward.settled
        rows = [arrived for arrived in backward.arrived if target in (arrived.use.weight, arrived.use.bias)]
        if not rows:
            return False
        backward.settled.add(target)
        if backward.number is None:
            backward.number, self.backwards = self.backwards, self.backwards + 1
        if len(rows) > 1:
            rows.sort(key=lambda arrived: arrived.order)
        if len(target.passes) >= PENDING:
            self._tell(
                f"pending {target.name}",
                f"{target.name}: more than {PENDING} backward passes without a step; the oldest are forgotten",
            )
            del target.passes[0]
        if any(row.half for row in rows):
            target.half = True
        target.passes.append(Pass(backward.number, rows, target.projection is None, target in backward.fresh))
        return True

    def leave_arena(self) -> None:
        """Copy what is still waiting for its step: the arena is about to be used for other rows."""
        waiting = [row for target in self._targets.parameters for one in target.passes for row in one.rows]
        for backward in self._open.values():
            self._told_of(backward)
            waiting += backward.arrived
        for row in dict.fromkeys(waiting):
            row.move_out()

    def forget_unfinished(self) -> None:
        """Drop what arrived in backward passes that never ended (an exception inside them)."""
        if torch._C._current_graph_task_id() == -1:
            self._open.clear()
            self._accumulated.clear()


class Within:
    """Says which batch the forward passes meanwhile are of; a generator would cost more at every step."""

    def __init__(self, capture: Capture, batch: Batch) -> None:
        self._capture, self._batch = capture, batch

    def __enter__(self) -> None:
        if self._capture.batch is not None:
            raise BadCall("recorder.batch(…) is already open; leave it before the next batch.")
        self._capture.batch = self._batch

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        batch = self._batch
        self._capture.batch = None
        self._capture.forget_unfinished()
        if kind is not None:
            return
        for shape, use in batch.shapes.items():
            leading = use.kind.leading(shape)
            if batch.fit(leading):
                return
        if batch.shapes:
            raise BadIds(
                f"ids of shape {list(batch.ids.shape)} fit no recorded layer: inputs have leading dimensions "
                f"{list(leading)}. Pass one id per row, one per example along dimension {batch.dim}, "
                "or name the batch dimension with recorder.batch(ids, dim=…)."
            )


def _product(output: Tensor) -> Tensor:
    """The tensor whose gradient is that of the product itself, whatever happens to the output in place.

    With a bias and more than two dimensions a linear layer returns a view of its product; an operation in place
    on a view (relu_) rewires the gradient past the view's own hooks, but not past those of its base.
    """
    base = output._base
    if base is not None and base.grad_fn is not None and base.numel() == output.numel():
        return base
    return output


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor lives inside a vmap or a torch.func.grad, where nothing ever accumulates into a parameter."""
    return bool(is_batchedtensor(tensor) or is_legacy_batchedtensor(tensor) or is_gradtrackingtensor(tensor))
