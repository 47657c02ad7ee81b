"""The hooks that turn a backward pass into events, without changing anything in it.

A forward hook puts a tensor hook on the layer's output. It copies key and gradient during backward, and the
weight's post-accumulate hook decides whether they became events: only then did the gradient reach the weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.recording.ids import NO_EXAMPLE, Batch
from dualform.recording.targets import HALVES, Arrived, Pass, Target, Targets, Use

PENDING = 1024  # backward passes that one parameter may gather before a step


@dataclass(frozen=True)
class _Forward:
    """One call of a module: its input by reference, and the ids that held at that moment."""

    order: int
    use: Use
    stored: Tensor
    version: int
    fixed: bool
    batch: Batch | None


@dataclass
class _Backward:
    """What arrived in one backward pass so far, and which parameters have taken it up."""

    arrived: list[Arrived] = field(default_factory=list)
    settled: set[Target] = field(default_factory=set)
    fresh: dict[Target, bool] = field(default_factory=dict)
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
        self._capture.guard(self._capture.saw_forward, self._use, args, kwargs, output)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


class Capture:
    """Installs the hooks, gathers passes in `target.passes`, and removes every hook at the end."""

    def __init__(
        self,
        targets: Targets,
        guard: Callable[..., Any],
        tell: Callable[[str, str], None],
        batch: Callable[[], Batch | None],
        wanted: Callable[[Target], bool],
        hold: Callable[[Target, str, Tensor], Tensor],
    ) -> None:
        self.guard = guard
        self._tell, self._batch, self._wanted, self._hold = tell, batch, wanted, hold
        self._targets = targets
        self._pid = os.getpid()
        self._order = 0
        self.backwards = 0
        self._open: dict[int, _Backward] = {}
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Put the hooks on, ours before the user's: a hook that replaces an output must come after."""
        for use in self._targets.uses:
            hook = _ForwardHook(self, use)
            self._handles.append(use.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        for target in self._targets.parameters:
            settle = partial(self.guard, self._accumulated, target)
            # A frozen parameter takes no such hook, but keeps one it got before.
            frozen = not target.parameter.requires_grad
            target.parameter.requires_grad_(True)
            self._handles.append(target.parameter.register_post_accumulate_grad_hook(settle))
            target.parameter.requires_grad_(not frozen)

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    def saw_forward(self, use: Use, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A recorded module was called: wait for its gradient, if one can come."""
        if os.getpid() != self._pid or not isinstance(output, Tensor) or not output.requires_grad:
            return
        stored = args[0] if args else kwargs.get("input")
        trained = any(target is not None and target.parameter.requires_grad for target in (use.weight, use.bias))
        if not isinstance(stored, Tensor) or not trained or _is_batched(output):
            return
        batch = self._batch()
        if batch is not None:
            leading = use.kind.leading(stored)
            batch.fitted += batch.fit(leading) is not None
            batch.misfits = leading
        fixed = not stored.requires_grad
        stored = stored.detach()
        if use.copy_at_forward:
            stored = stored.clone()
        call = _Forward(self._order, use, stored, stored._version, fixed, batch)
        self._order += 1
        _product(output).register_hook(partial(self.guard, self._saw_gradient, call))

    def _saw_gradient(self, call: _Forward, gradient: Tensor) -> None:
        if _is_batched(gradient):
            return  # a vectorised Jacobian: nothing accumulates
        use = call.use
        if call.stored._version != call.version and not use.copy_at_forward:
            use.copy_at_forward = True
            self._tell(
                f"in-place {use.map}",
                f"{use.map}: its input was changed in place between forward and backward; "
                "from now on it is copied at forward",
            )
        # Under autocast the product is computed in the output's dtype: so is the key.
        keys = use.kind.keys(call.stored).to(gradient.dtype)
        gradients = use.kind.gradients(gradient.detach())
        examples, positions = self._numbers(call, len(keys))
        trained = [target for target in (use.weight, use.bias) if target is not None and target.parameter.requires_grad]
        arrived = Arrived(
            call.order,
            use,
            self._hold(use.weight, "keys", keys),
            self._hold(use.weight, "gradients", gradients),
            examples,
            positions,
            call.fixed,
            {target: target.sketch_of(keys, gradients) for target in trained},
        )
        backward = self._backward()
        backward.arrived.append(arrived)
        for target in (use.weight, use.bias):
            if target is not None:
                backward.fresh.setdefault(target, target.parameter.grad is None)

    def _numbers(self, call: _Forward, events: int) -> tuple[Tensor, Tensor]:
        fitted = call.batch.fit(call.use.kind.leading(call.stored)) if call.batch else None
        if fitted is not None:
            return fitted
        if call.batch is not None:
            self._tell(
                f"ids {call.use.map}",
                f"{call.use.map}: ids of shape {list(call.batch.ids.shape)} fit no dimension of its input "
                f"{list(call.use.kind.leading(call.stored))}; its events get example {NO_EXAMPLE}",
            )
        else:
            self._tell("no ids", f"no ids are given (recorder.batch); events get example {NO_EXAMPLE}")
        return torch.full((events,), NO_EXAMPLE), torch.zeros(events, dtype=torch.int64)

    def _backward(self) -> _Backward:
        task = torch._C._current_graph_task_id()
        if task not in self._open:
            self._open[task] = _Backward()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._ended, task))
        return self._open[task]

    def _ended(self, task: int) -> None:
        self._open.pop(task, None)

    def _accumulated(self, target: Target, _: Tensor) -> None:
        if os.getpid() == self._pid:
            self.settle(target)

    def settle(self, target: Target) -> None:
        """The current backward pass has put its gradient into this parameter: make its rows events."""
        backward = self._open.get(torch._C._current_graph_task_id())
        if backward is None or target in backward.settled or not self._wanted(target):
            return
        rows = [a for a in backward.arrived if target in (a.use.weight, a.use.bias)]
        if not rows:
            return
        backward.settled.add(target)
        if backward.number is None:
            backward.number, self.backwards = self.backwards, self.backwards + 1
        rows.sort(key=lambda arrived: arrived.order)
        if len(target.passes) >= PENDING:
            self._tell(
                f"pending {target.name}",
                f"{target.name}: more than {PENDING} backward passes without a step; the oldest are forgotten",
            )
            del target.passes[0]
        target.passes.append(_gather(target, rows, backward.number, backward.fresh.get(target, False)))

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


def _gather(target: Target, rows: list[Arrived], number: int, fresh: bool) -> Pass:
    """A pass of one parameter, with the sketch of what its rows put into the gradient."""
    total = np.zeros(0)
    for row in rows:
        sketch = row.sketches[target].reshape(-1).cpu().numpy().astype(np.float64)
        total = total + sketch if len(total) else sketch
        target.half |= row.keys.dtype in HALVES
        if target is row.use.weight:
            row.finite = bool(np.isfinite(sketch).all())
    return Pass(number, total, rows, target.projection is None, fresh)
