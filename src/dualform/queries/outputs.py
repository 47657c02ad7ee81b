"""The output of a layer rebuilt: what no event made, and what the events add to it (Eq. 13)."""

from __future__ import annotations

from jaxtyping import Float64
from torch import Tensor

from dualform.queries.focus import Focus
from dualform.queries.folds import Folds
from dualform.queries.kernels import Kernel, output_reducer
from dualform.queries.linear import FoldSums
from dualform.queries.plan import Plan, answer, finite
from dualform.queries.values import fold, require_values


def initial_plan(focus: Focus) -> Plan[Tensor]:
    """The part of the output that no event of the weight made."""
    require_values(focus.memory, focus.weight, "initial()")
    return Plan(Tensor, focus, (), lambda rows: _shaped(focus, _initial(focus)))


def output_plan(focus: Focus, kernel: Kernel | None, attend: bool = False) -> Plan[Tensor]:
    """The whole output; with `attend` the events are attended over one by one, however many queries there are."""
    require_values(focus.memory, focus.weight, "output()")
    events = _folded(focus) if kernel is None and not attend else None
    return (events or _attended(focus, kernel)).then(Tensor, lambda part: _shaped(focus, _initial(focus) + part))


def _attended(focus: Focus, kernel: Kernel | None) -> Plan[Tensor]:
    reducer = output_reducer(kernel, focus.queries, focus.coefficients, focus.record.dim_out)
    return Plan(Tensor, focus, (reducer,), lambda rows: reducer.result())


def _folded(focus: Focus) -> Plan[Tensor] | None:
    """The events folded into a weight, and that applied to the queries; None where attending costs less."""
    dim_out, dim_in = focus.record.dim_out, focus.record.dim_in
    if len(focus.queries) * (dim_in + dim_out) <= dim_in * dim_out:
        return None
    room, key = focus.memory.room, ("folded", focus.weight, focus.use, focus.until)
    folded: FoldSums | None = None if focus.selection else room.find(key)
    reducers: tuple[FoldSums, ...] = ()
    if folded is None:
        folded = FoldSums(None, focus.coefficients, dim_out, dim_in)
        reducers = (folded,)

    def finish(rows: int) -> Tensor:
        if not finite(folded.weights, folded.biases, focus.queries):
            return answer(_attended(focus, None))
        if not focus.selection:
            room.keep(key, folded, folded.weights.nbytes)
        return focus.queries.double() @ folded.weights[0].T + folded.biases[0]

    return Plan(Tensor, focus, reducers, finish)


def _initial(focus: Focus) -> Float64[Tensor, "queries dim_out"]:
    folds = Folds(focus.memory)
    result = focus.queries.double() @ folds.untouched(focus.record.name, focus.until).T
    bias = focus.record.uses[focus.use].bias
    if bias is not None:
        result = result + folds.untouched(bias, focus.until)
        for other, owner in enumerate(focus.memory.manifest.weights):
            # A bias shared with a layer of another weight was also moved by that weight's events.
            if other != focus.weight and any(use.bias == bias for use in owner.uses):
                result = result + fold(focus.memory, other, focus.until, focus.selection)[1][bias]
    return result


def _shaped(focus: Focus, rows: Float64[Tensor, "queries dim_out"]) -> Float64[Tensor, "*query_shape dim_out"]:
    return rows.reshape(*focus.query_shape, focus.record.dim_out)
