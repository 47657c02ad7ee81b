"""One forward pass of the model: the queries that test inputs give to every recorded layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import BadCall, BadQuery, ModelMismatch
from dualform.layers import layer_type
from dualform.memory import StoredMemory
from dualform.memory.manifest import UseRecord
from dualform.queries.focus import Focus
from dualform.queries.selection import Selection
from dualform.queries.spotlight import Attention, Spotlight

DUAL = "_dualform_memory"


def uses_of(memory: StoredMemory) -> dict[str, tuple[int, int, UseRecord]]:
    """Every linear map of a memory by its name: the number of its weight, of its use, and its record."""
    return {
        use.map: (weight, at, use)
        for weight, record in enumerate(memory.manifest.weights)
        for at, use in enumerate(record.uses)
    }


def find_map(memory: StoredMemory, layer: str) -> str:
    """The map that a user means by a layer's name; the module's bare name works where it has one map."""
    uses = uses_of(memory)
    if layer in uses:
        return layer
    inside = [name for name, (_, _, use) in uses.items() if use.module == layer]
    if len(inside) == 1:
        return inside[0]
    there = ", ".join(uses)
    detail = f"has several maps: {', '.join(inside)}" if inside else f"is not recorded; recorded layers: {there}"
    raise BadQuery(f"{layer!r} {detail}.")


def is_memorys(memory: StoredMemory, model: nn.Module) -> bool:
    """Whether the model has the weights of the memory's last step; one made by dual() may be of any step or mask."""
    if hasattr(model, DUAL):
        return False
    try:
        check_model(memory, model)
    except ModelMismatch:
        return False
    return True


def check_model(memory: StoredMemory, model: nn.Module) -> None:
    """ModelMismatch where the model's weights are not those of the memory's last step."""
    if getattr(model, DUAL, None) == memory.manifest.id:
        return
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for index, record in enumerate(memory.manifest.parameters):
        tensor = tensors.get(record.name)
        if tensor is None or tuple(tensor.shape) != record.shape:
            found = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
            raise ModelMismatch(
                f"the model is not the memory's: {record.name} should have shape {list(record.shape)}, found {found}."
            )
        kept = memory.sketch(index, memory.steps)
        if kept is None:
            continue
        probe = memory.probe(index)
        matrix = tensor.detach().cpu().double()
        sketch = matrix if probe is None else matrix @ probe
        eps = torch.finfo(getattr(torch, record.dtype)).eps
        allowed = 100 * eps * max(memory.steps, 1) ** 0.5 * float(kept.norm())
        distance = float((sketch - kept).norm())
        if not distance <= allowed and not (bool(kept.isnan().any()) and bool(sketch.isnan().any())):
            raise ModelMismatch(
                f"the model is not the memory's: {record.name} differs from its last recorded step {memory.steps} by "
                f"{distance / max(float(kept.norm()), 1e-300):.2g} of its size. Pass the model as it was at the end of "
                "recording, attend(…, until=s) for another step, or check=False to use its queries all the same."
            )
    _check_others(memory, model)


def _check_others(memory: StoredMemory, model: nn.Module) -> None:
    """ModelMismatch where an unrecorded parameter or buffer is not the stored one."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, kept in memory.others(memory.steps)[0].items():
        tensor = tensors.get(name)
        if tensor is None or name.endswith("num_batches_tracked"):
            continue
        same = tensor.shape == kept.shape and torch.allclose(
            tensor.detach().cpu().double(), kept.double(), rtol=1e-4, atol=1e-6, equal_nan=True
        )
        if not same:
            raise ModelMismatch(
                f"the model is not the memory's: {name}, which is not recorded but stored, differs from step "
                f"{memory.steps}. Pass the model as it was at the end of recording, or check=False."
            )


def attend(memory: StoredMemory, model: nn.Module, inputs: Any, until: int, batch_size: int | None) -> Spotlight:
    """Run the model on the inputs, without gradients and in eval mode, and collect every layer's queries."""
    uses = uses_of(memory)
    modules = dict(model.named_modules())
    missing = [use.module for _, _, use in uses.values() if use.module not in modules]
    if missing:
        raise ModelMismatch(f"the model has no module {missing[0]!r}, which the memory was recorded from.")
    gathered: dict[str, list[list[Tensor]]] = {name: [] for name in uses}
    handles = []
    modes = [(module, module.training) for module in model.modules()]
    # In eval mode, torch's transformer layers may use the weights of their linear layers without calling them.
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for name, (_, _, use) in uses.items():

            def keep(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                gathered[name][-1].append(_real(args[0] if args else kwargs["input"]).clone())

            handles.append(modules[use.module].register_forward_pre_hook(keep, with_kwargs=True))
        model.eval()
        with torch.no_grad():
            for args, kwargs in _batches(inputs, batch_size):
                for calls in gathered.values():
                    calls.append([])
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
        torch.backends.mha.set_fastpath_enabled(fast)
    attentions = {}
    for name, batches in gathered.items():
        if any(batches):
            weight, at, use = uses[name]
            attentions[name] = Attention(_focus(memory, weight, at, use, batches, until))
    return Spotlight(attentions, list(uses), lambda layer: find_map(memory, layer))


def given_queries(memory: StoredMemory, queries: Any, until: int) -> Spotlight:
    """A spotlight from queries that the user has already: a dict from layer names to tensors [..., dim_in]."""
    if not isinstance(queries, dict):
        raise BadCall("attend(None, …) takes a dict from layer names to queries.")
    uses = uses_of(memory)
    attentions = {}
    for layer, tensor in queries.items():
        name = find_map(memory, layer)
        weight, at, use = uses[name]
        attentions[name] = Attention(_focus(memory, weight, at, use, [[_real(tensor)]], until))
    return Spotlight(attentions, list(uses), lambda layer: find_map(memory, layer))


def _real(queries: Any) -> Tensor:
    """Queries as a real floating-point tensor; whole numbers are taken as such."""
    try:
        tensor = torch.as_tensor(queries)
    except (TypeError, ValueError, RuntimeError):
        raise BadQuery(f"queries must be a tensor of numbers, not {type(queries).__name__}.") from None
    if tensor.is_complex():
        raise BadQuery("queries must be real numbers, not complex ones.")
    return tensor.detach() if tensor.is_floating_point() else tensor.to(torch.float32)


def _batches(inputs: Any, batch_size: int | None) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    args = () if isinstance(inputs, dict) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if not tensors:
        raise BadCall("attend needs inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.")
    sizes = {len(t) for t in tensors if t.ndim > 0}
    if batch_size is None or len(sizes) != 1 or all(t.ndim < 2 for t in tensors):
        yield args, kwargs
        return
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise BadCall(f"batch_size must be a whole number of at least 1, or None, not {batch_size!r}.")

    def part(value: Any, start: int) -> Any:
        return value[start : start + batch_size] if isinstance(value, Tensor) and value.ndim > 0 else value

    for start in range(0, max(sizes.pop(), 1), batch_size):
        yield (
            tuple(part(a, start) for a in args),
            {name: part(value, start) for name, value in kwargs.items()},
        )


def _focus(
    memory: StoredMemory, weight: int, at: int, use: UseRecord, batches: list[list[Tensor]], until: int
) -> Focus:
    """Queries of all batches and calls: batches follow each other along dim 0, calls make a dimension before it."""
    kind = layer_type(use.kind)
    if kind is None:
        raise BadQuery(f"{use.map} is of type {use.kind!r}, which this dualform does not know.")
    calls = [list(call) for call in zip(*batches, strict=False)]
    same = len({len(batch) for batch in batches}) == 1 and len({p.shape[1:] for call in calls for p in call}) == 1
    joined = [torch.cat(call) if call[0].ndim > 1 else torch.stack(call) for call in calls] if same else []
    if same and len({tensor.shape for tensor in joined}) == 1:
        stored = joined[0] if len(joined) == 1 else torch.stack(joined)
        shape = kind.leading(stored.shape)
        rows = kind.keys(stored)
        if len(batches) == 1 and calls[0][0].ndim == 1 and len(joined) == 1:
            shape = ()
    else:
        # Calls of different shapes have no common leading dimensions: a plain list of queries.
        # In the order of the calls whatever the batches, which a call may have had more or fewer of.
        rounds = itertools.zip_longest(*batches)
        rows = torch.cat([kind.keys(tensor) for call in rounds for tensor in call if tensor is not None])
        shape = (len(rows),)
    width = memory.manifest.weights[weight].dim_in
    if rows.shape[1] != width:
        raise BadQuery(
            f"queries of {use.map or 'the model'} must have width {width}, its number of inputs, not {rows.shape[1]}."
        )
    return Focus(memory, weight, at, rows, shape, until, Selection())
