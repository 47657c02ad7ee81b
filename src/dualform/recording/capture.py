"""The hooks that turn a backward pass into events, without changing anything in it.

A forward hook puts a tensor hook on the layer's output, which keeps the gradient. When the backward pass has ended,
keys and gradients are copied, and the weights' post-accumulate hooks have said which of them became events: only
where a gradient reached the weight.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as current_task
from torch._C._functorch import (
    is_batchedtensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
    maybe_current_level,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from dualform.memory.arena import Staging
from dualform.recording.backward import Backward
from dualform.recording.calls import Forward, Known
from dualform.recording.ids import NO_EXAMPLE, Batch, Numbers, nowhere
from dualform.recording.plain import run_plain
from dualform.recording.routine import Rows, Taking
from dualform.recording.targets import Arrived, Pass, Target, Targets, Use

WAITING = 256 << 20  # bytes of gradients that may wait for the end of their backward pass
LATE = 64  # backward passes that wait to be settled
KINDS = 4  # of backward passes, for which there is a routine each
PENDING = 1024  # backward passes that one parameter may gather before a step
OURS = "dualform"  # among a tensor's hooks, of which torch numbers its own
_gradient, _NONE = attrgetter("grad"), itertools.repeat(None)


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


class Hooks(dict[Any, Any]):
    """The hooks of a tensor, as torch keeps them, which looks at them weakly; an OrderedDict takes longer to make."""

    __slots__ = ("__weakref__",)


class Capture:
    """Installs the hooks, gathers passes in `target.passes`, and removes every hook at the end."""

    def __init__(
        self,
        targets: Targets,
        shield: Callable[..., Any],
        fail: Callable[[Exception], None],
        tell: Callable[[str, str], None],
        wanted: Callable[[Target], bool],
        catch_up: Callable[[], None],
        values: bool,
    ) -> None:
        self.shield, self._fail = shield, fail
        self.staging = Staging()
        self.batch: Batch | None = None
        self._tell, self._wanted, self._catch_up, self._values = tell, wanted, catch_up, values
        self._targets = targets
        self._by_parameter = {id(target.parameter): target for target in targets.parameters}
        self._parameters = [target.parameter for target in targets.parameters]
        self._order = 0
        self.pid = os.getpid()  # a forked child records nothing
        self.backwards = 0
        self.open: dict[int, Backward] = {}  # the backward passes that are going on
        self.ended: list[Backward] = []  # those that are still to be settled
        self.routines: list[Taking] = []  # for passes of several kinds, the last one first
        self._accumulated: list[Tensor] = []
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Put the hooks on, ours before the user's: a hook that replaces an output must come after."""
        for use in self._targets.uses:
            hook = _ForwardHook(self.saw_forward, use)
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
        self.open.clear()
        self.ended.clear()
        self._accumulated.clear()

    def saw_forward(
        self, use: Use, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A recorded module was called: wait for its gradient, if one can come."""
        # Between two large products the interpreter itself has left the cache, and every line is slow: so here and in
        # the gradient's hook the least possible, and the rest for all layers at once when the backward pass has ended.
        try:
            node = output.grad_fn if isinstance(output, Tensor) else None
            if node is None:  # no gradient can come
                return
            if maybe_current_level() is not None and _is_wrapped(output):
                return
            stored = args[0] if args else kwargs.get("input")
            if not isinstance(stored, Tensor) or not (use.weight.parameter.requires_grad or use.trained):
                return
            if use.copy_at_forward:
                stored = stored.detach().clone().requires_grad_(stored.requires_grad)
            try:
                version = stored._version
            except RuntimeError:  # an inference tensor keeps no count of its changes
                stored = stored.clone()
                version = stored._version
            order, batch = self._order, self.batch
            self._order = order + 1
            if batch is not None:
                batch.inputs.append((use, stored.shape))
            hook = partial(self._saw_gradient, (order, use, stored, version, batch))
            product = output
            if output._base is not None:
                product = _product(output)
                node = product.grad_fn
            if node is None or product._backward_hooks is not None:
                product.register_hook(hook)
            else:  # the same as register_hook does, but for a handle to remove the hook by
                product._backward_hooks = Hooks({OURS: hook})
                node._register_hook_dict(product)
        except Exception as error:
            self._fail(error)

    def _saw_gradient(self, forward: Forward, gradient: Tensor | None) -> None:
        # No shield around what cannot fail; no user code runs before the backward pass has ended.
        task = current_task()
        backward = self.open.get(task) or self.shield(self._begun, task)
        if backward is None or gradient is None:  # recording has stopped, or nothing flows back to this layer
            return
        backward.waiting.append((forward, gradient))
        backward.bytes += gradient.numel() * gradient.itemsize  # `nbytes` raises for a sparse one
        if backward.bytes > WAITING:
            self.shield(run_plain, self._take_in, backward)

    def _begun(self, task: int) -> Backward:
        if not self.open:
            self._accumulated.clear()  # by a pass through none of our layers
        backward = self.open[task] = Backward([*map(is_, map(_gradient, self._parameters), _NONE)])
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, task))
        return backward

    def _ended(self, task: int) -> None:
        """A backward pass is over: what arrived in it became events where a gradient accumulated."""
        try:
            backward = self.open.get(task)
            if backward is None:
                return
            if not self._taken_as_before(backward):
                run_plain(self._take_in, backward)
            del self.open[task]
            backward.accumulated = self._accumulated[:]
            if self.open:  # a backward pass within another leaves the other's gradients to it
                self._catch_up()
                self._accumulated[:] = self._settle_all(backward)
                return
            self._accumulated.clear()
            self.ended.append(backward)
            if len(self.ended) >= LATE:
                self._catch_up()
        except Exception as error:
            self._fail(error)

    def _taken_as_before(self, backward: Backward) -> bool:
        """Have the routine of the last pass take in this one; False where it is not for such a pass."""
        arena = self.staging.arena
        if not self.routines or arena is None:
            return False
        routine = self.routines[0]
        copied = routine.take(backward.waiting, arena)
        if copied is None:
            return False
        _, batch = copied.orders[-1]
        if batch is not None and ((batch.dim, batch.shape) == routine.fitting or routine.fits(batch)):
            batch.fitted = True
        backward.waiting.clear()
        backward.bytes = 0
        backward.copied.append(copied)
        return True

    def _take_in(self, backward: Backward) -> None:
        """Copy the keys and gradients that have arrived, and sketch what they put into the parameters."""
        waiting: list[tuple[Forward, Tensor]] = []
        rows: list[Rows] = []
        for one in backward.waiting:
            # Within a vectorised Jacobian nothing accumulates.
            if not _is_wrapped(one[1]) and (found := self._rows(*one)) is not None:
                waiting.append(one)
                rows.append(found)
        backward.waiting.clear()
        backward.bytes = 0
        if rows and not self._by_routine(backward, waiting, rows):
            self._told_of(backward)
            outside = self.staging.outside
            for (forward, _), (keys, gradients) in zip(waiting, rows, strict=True):
                call, use = Known.of(forward), forward[1]
                kept = self.staging.hold(use.streams[1], gradients) if self._values else gradients.detach()
                examples, positions = map(torch.from_numpy, self.numbers(call))
                kept_keys = self.staging.hold(use.streams[0], keys)
                arrived = Arrived(call.order, use, kept_keys, kept, examples, positions, call.fixed)
                arrived.sketch = use.sketch(keys, gradients)
                backward.arrived.append(arrived)
            backward.outside += self.staging.outside - outside

    def _by_routine(self, backward: Backward, waiting: Sequence[tuple[Forward, Tensor]], rows: Sequence[Rows]) -> bool:
        """Have compiled loops take in what has arrived; False where they cannot."""
        arena = self.staging.arena
        if self._targets.swift.loops is None or arena is None:
            return False
        if not Taking.possible(rows):
            return False
        routine = next((one for one in self.routines if one.matches(waiting, rows)), None)
        if routine is None:
            routine = Taking(waiting, rows, self._values, self._targets.swift)
        self.routines = [routine, *(one for one in self.routines if one is not routine)][:KINDS]
        copied = routine.take_rows(waiting, rows, arena)
        if copied is not None:
            backward.copied.append(copied)
        return copied is not None

    def _told_of(self, backward: Backward) -> None:
        """Make rows that have arrived of what routines have copied."""
        made = [row for copied in backward.copied for row in copied.routine.arrived(copied, self.numbers)]
        # Both at once: an interrupt in between would make them rows twice.
        backward.arrived, backward.copied = [*backward.arrived, *made], []

    def _rows(self, forward: Forward, gradient: Tensor) -> Rows | None:
        _, use, stored, version, _ = forward
        use.weight.check_shape()
        if _is_gone(stored) or _is_gone(gradient):
            use.copy_at_forward = True
            self._tell(
                f"gone {use.map}",
                f"{use.map}: the memory of its input or its gradient was given back within the backward pass, "
                "so the events of that pass are lost; from now on its input is copied at forward",
            )
            return None
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
        return keys, gradients

    def numbers(self, call: Known) -> Numbers:
        """The example and the position of every event of a call."""
        leading = call.use.kind.leading(call.shape)
        numbers = None if call.batch is None else call.batch.fit(leading)
        if numbers is not None:
            return numbers
        if call.batch is not None:
            self._tell(
                f"ids {call.use.map}",
                f"{call.use.map}: ids of shape {list(call.batch.shape)} fit no dimension of its input "
                f"{list(leading)}; its events get example {NO_EXAMPLE}",
            )
        else:
            self._tell("no ids", f"no ids are given (recorder.batch); events get example {NO_EXAMPLE}")
        events = math.prod(leading)
        return np.full(events, NO_EXAMPLE), nowhere(events)

    def settle_all(self, ended: Sequence[Backward]) -> None:
        """Make what arrived in these backward passes events; where it was already, that is all."""
        for backward in ended:
            self._settle_all(backward)

    def _settle_all(self, backward: Backward) -> list[Tensor]:
        """The parameters that took their gradient from elsewhere."""
        self._told_of(backward)
        return [p for p in backward.accumulated if not self._settle(self._by_parameter[id(p)], backward)]

    def settle(self, target: Target) -> None:
        """An optimiser is about to step this parameter within a backward pass: its gradient is there already."""
        backward = self.open.get(current_task())
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
        one = Pass(backward.number, rows, target.projection is None, backward.fresh[target.index])
        backward.settled.add(target)
        target.passes.append(one)
        return True

    def leave_arena(self) -> None:
        """Copy what is still waiting for its step: the arena is about to be used for other rows."""
        waiting = [row for target in self._targets.parameters for one in target.passes for row in one.rows]
        for backward in self.open.values():
            self._told_of(backward)
            waiting += backward.arrived
        for row in dict.fromkeys(waiting):
            row.move_out()

    @property
    def unfinished(self) -> bool:
        """Whether there is anything of backward passes that did not end, or went through none of our layers."""
        return bool(self.open or self._accumulated)

    def forget_unfinished(self) -> None:
        """Drop what arrived in backward passes that never ended (an exception inside them)."""
        if current_task() == -1:
            self.open.clear()
            self._accumulated.clear()


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
    """Whether a tensor lives inside a vmap or a torch.func.grad, or has no numbers: nothing of it ever accumulates."""
    inside = is_batchedtensor(tensor) or is_legacy_batchedtensor(tensor) or is_gradtrackingtensor(tensor)
    return bool(inside or isinstance(tensor, FakeTensor))


def _is_gone(tensor: Tensor) -> bool:
    """Whether the memory of a tensor was given back, as some do with an input once its layer's own pass is over."""
    if tensor.layout is not torch.strided or not tensor.numel() or _is_wrapped(tensor):
        return False
    return tensor.untyped_storage().nbytes() == 0
