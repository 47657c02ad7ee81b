"""The hooks that turn a backward pass into events, without changing anything in it.

A forward hook puts a tensor hook on the layer's output, which keeps the gradient. When the backward pass has ended,
keys and gradients are copied, and the weights' post-accumulate hooks have said which of them became events: only
where a gradient reached the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.memory.arena import Held
from dualform.recording.ids import NO_EXAMPLE, Batch
from dualform.recording.jobs import ROWS, Slot, fits
from dualform.recording.plain import run_plain
from dualform.recording.targets import Arrived, Pass, Target, Targets, Use

WAITING = 256 << 20  # bytes of gradients that may wait for the end of their backward pass
PENDING = 1024  # backward passes that one parameter may gather before a step


class _Forward(NamedTuple):
    """One call of a module: its input by reference, and the ids that held at that moment."""

    order: int
    use: Use
    stored: Tensor
    version: int
    fixed: bool
    batch: Batch | None
    numbers: tuple[Tensor, Tensor] | None


@dataclass
class _Backward:
    """What arrived in one backward pass so far, and which parameters have taken it up.

    `waiting` are calls and their gradients as they came, still to be copied.
    """

    waiting: list[tuple[_Forward, Tensor]] = field(default_factory=list)
    bytes: int = 0
    arrived: list[Arrived] = field(default_factory=list)
    settled: set[Target] = field(default_factory=set)
    fresh: list[Target] = field(default_factory=list)
    number: int | None = None


def inert(*_: Any) -> None:
    """What a hook becomes in a copy of the model: nothing."""


def _make_inert() -> Callable[..., None]:
    return inert


class _ForwardHook:
    """A module's forward hook; in a deep copy or a pickle of the model it does nothing."""

    def __init__(self, capture: Capture, use: Use) -> None:
        self._capture, self._use = capture, use

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._capture.shield(self._capture.saw_forward, self._use, args, kwargs, output)

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
        batch: Callable[[], Batch | None],
        wanted: Callable[[Target], bool],
        values: bool,
    ) -> None:
        self.shield = shield
        self.hold: Callable[[str, Tensor], Tensor] = lambda stream, rows: rows.clone()
        self.reserve: Callable[[str, Tensor], Held | None] = lambda stream, rows: None
        self._tell, self._batch, self._wanted, self._values = tell, batch, wanted, values
        self._targets = targets
        self._by_parameter = {id(target.parameter): target for target in targets.parameters}
        self._order = 0
        self.backwards = 0
        self._open: dict[int, _Backward] = {}
        self._accumulated: list[Tensor] = []
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Put the hooks on, ours before the user's: a hook that replaces an output must come after."""
        for use in self._targets.uses:
            hook = _ForwardHook(self, use)
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
        self._accumulated.clear()

    def saw_forward(self, use: Use, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A recorded module was called: wait for its gradient, if one can come."""
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        if not use.weight.parameter.requires_grad and not use.trained:
            return
        stored = args[0] if args else kwargs.get("input")
        if not isinstance(stored, Tensor) or _is_batched(output):
            return
        batch, numbers = self._batch(), None
        if batch is not None:
            batch.misfits = leading = use.kind.leading(stored)
            numbers = run_plain(batch.fit, leading) if leading not in batch.fits else batch.fits[leading]
            batch.fitted += numbers is not None
        fixed = not stored.requires_grad
        stored = stored.detach()
        if use.copy_at_forward:
            stored = stored.clone()
        call = _Forward(self._order, use, stored, stored._version, fixed, batch, numbers)
        self._order += 1
        _product(output).register_hook(partial(self.shield, self._saw_gradient, call))

    def _saw_gradient(self, call: _Forward, gradient: Tensor) -> None:
        # Between two large products the interpreter itself has left the cache, and every line here is slow: so the
        # least possible. No user code runs before the backward pass has ended.
        task = torch._C._current_graph_task_id()
        backward = self._open.get(task) or self._begun(task)
        backward.waiting.append((call, gradient))
        backward.bytes += gradient.nbytes
        if backward.bytes > WAITING:
            run_plain(self._take_in, backward)

    def _begun(self, task: int) -> _Backward:
        if not self._open:
            self._accumulated.clear()  # by a pass through none of our layers
        fresh = [target for target in self._targets.parameters if target.parameter.grad is None]
        self._open[task] = _Backward(fresh=fresh)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self.shield, run_plain, self._ended, task))
        return self._open[task]

    def _take_in(self, backward: _Backward) -> None:
        """Copy the keys and gradients that have arrived, and sketch what they put into the parameters."""
        jobs = self._targets.swift.jobs()
        taken: list[tuple[Arrived, Slot, Tensor, Tensor]] = []  # what is copied must stay until it is
        for call, gradient in backward.waiting:
            if _is_batched(gradient):  # a vectorised Jacobian: nothing accumulates
                continue
            keys, gradients = self._rows(call, gradient)
            examples, positions = call.numbers or self._no_numbers(call, len(keys))
            use, known = call.use, (examples, positions, call.fixed, call.use.trained)
            if jobs is not None and fits(keys) and fits(gradients) and 0 < len(keys) <= ROWS:
                of_keys, keys_to = self._place(use.streams[0], keys)
                of_gradients, gradients_to = self._place(use.streams[1], gradients) if self._values else (None, 0)
                arrived = Arrived(call.order, use, of_keys, of_gradients, *known)
                columns = use.weight.columns(torch.float32, keys.device)
                slot = jobs.take(keys, gradients, columns, keys_to, gradients_to)
                taken.append((arrived, slot, keys, gradients))
            else:
                of_keys = self.hold(use.streams[0], keys)
                of_gradients = self.hold(use.streams[1], gradients) if self._values else gradients
                sketch = use.sketch(keys, gradients)
                arrived = Arrived(call.order, use, of_keys, of_gradients, *known, sketch)
            backward.arrived.append(arrived)
        if jobs is not None and taken:
            results, sums = jobs.run()
            for arrived, slot, _, gradients in taken:
                outputs = gradients.shape[1]
                arrived.sketch = results[slot.result : slot.result + 5 * outputs].reshape(5, outputs)
                of_weight, of_bias, finite = sums[slot.sums : slot.sums + 3].tolist()
                arrived.sizes = of_weight, of_bias
                if not finite and arrived.kept_gradients is None:
                    arrived.kept_gradients = gradients  # to count the events that are not
        backward.waiting.clear()
        backward.bytes = 0

    def _place(self, stream: str, rows: Tensor) -> tuple[Held | Tensor, int]:
        """Where rows are kept, and the address to which they are still to be copied; 0 for nowhere."""
        held = self.reserve(stream, rows)
        return (self.hold(stream, rows), 0) if held is None else (held, held.address)

    def _rows(self, call: _Forward, gradient: Tensor) -> tuple[Tensor, Tensor]:
        use = call.use
        if call.stored._version != call.version and not use.copy_at_forward:
            use.copy_at_forward = True
            self._tell(
                f"in-place {use.map}",
                f"{use.map}: its input was changed in place between forward and backward; "
                "from now on it is copied at forward",
            )
        keys = use.kind.keys(call.stored)
        if keys.dtype != gradient.dtype:  # under autocast the product is in the output's dtype: so is the key
            keys = keys.to(gradient.dtype)
        return keys, use.kind.gradients(gradient.detach())

    def _no_numbers(self, call: _Forward, events: int) -> tuple[Tensor, Tensor]:
        if call.batch is not None:
            self._tell(
                f"ids {call.use.map}",
                f"{call.use.map}: ids of shape {list(call.batch.ids.shape)} fit no dimension of its input "
                f"{list(call.use.kind.leading(call.stored))}; its events get example {NO_EXAMPLE}",
            )
        else:
            self._tell("no ids", f"no ids are given (recorder.batch); events get example {NO_EXAMPLE}")
        return torch.full((events,), NO_EXAMPLE), torch.zeros(events, dtype=torch.int64)

    def _ended(self, task: int) -> None:
        """A backward pass is over: what arrived in it became events where a gradient accumulated."""
        backward = self._open.get(task)
        if backward is not None:
            self._take_in(backward)
            del self._open[task]
            others = [p for p in self._accumulated if not self._settle(self._by_parameter[id(p)], backward)]
            # A backward pass within another leaves the other's gradients to it.
            self._accumulated[:] = others if self._open else []

    @property
    def within_backward(self) -> bool:
        """Whether a backward pass through a recorded layer is going on."""
        return bool(self._open)

    def settle(self, target: Target) -> None:
        """An optimiser is about to step this parameter within a backward pass: its gradient is there already."""
        backward = self._open.get(torch._C._current_graph_task_id())
        if backward is not None:
            self._take_in(backward)
            self._settle(target, backward)

    def _settle(self, target: Target, backward: _Backward) -> bool:
        """Make the rows of a backward pass events of a parameter that took its gradient from it."""
        if target in backward.settled or not self._wanted(target):
            return target in backward.settled
        rows = [arrived for arrived in backward.arrived if target in arrived.trained]
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
        waiting += [row for backward in self._open.values() for row in backward.arrived]
        for row in dict.fromkeys(waiting):
            row.move_out()

    def forget_unfinished(self) -> None:
        """Drop what arrived in backward passes that never ended (an exception inside them)."""
        if torch._C._current_graph_task_id() == -1:
            self._open.clear()
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


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor lives inside a vmap, where nothing ever accumulates into a parameter."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
