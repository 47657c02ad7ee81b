"""The spotlight: the scores of some queries over a memory, and what is read off them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from dualform.blocks import Block
from dualform.errors import BadQuery
from dualform.memory import StoredMemory
from dualform.queries.folds import Folds
from dualform.queries.kernels import Kernel, output_reducer
from dualform.queries.reducers import (
    AllScores,
    GroupSums,
    Reducer,
    Top,
    TopWithin,
    VectorSums,
    check_count,
    check_order,
    rank_keys,
)
from dualform.queries.results import Explanation, TopEvents, TopGroups, Totals
from dualform.queries.scorers import AttentionScorer, DirectionScorer, NormScorer, Scorer
from dualform.queries.selection import Grouping, Selection
from dualform.queries.values import Coefficients, fold, require_values

Columns = str | tuple[str, ...]
SCORES_BYTES = 1 << 30


@dataclass(frozen=True)
class Focus:
    """Which events of which weight are looked at, by which queries, at which end step."""

    memory: StoredMemory
    weight: int
    use: int
    queries: Float[Tensor, "queries dim_in"]
    query_shape: tuple[int, ...]
    until: int
    selection: Selection = field(default_factory=Selection)

    def blocks(self) -> Iterator[Block]:
        """The selected events, block by block."""
        for block in self.memory.blocks(self.weight, self.until):
            yield self.selection.apply(block)

    def reduce(self, reducer: Reducer) -> int:
        """Run a reducer over all selected events; how many rows were read."""
        rows = 0
        for block in self.blocks():
            rows += len(block)
            if len(block):
                reducer.update(block)
        return rows

    def narrowed(self, where: dict[str, Any]) -> Focus:
        """The same queries over fewer events."""
        return dataclasses.replace(self, selection=self.selection.narrowed(self.memory, where))

    def picked(self, index: Any) -> Focus:
        """Fewer queries over the same events; `index` is an index into the query shape."""
        numbers = torch.arange(len(self.queries)).reshape(self.query_shape)[index]
        return dataclasses.replace(self, queries=self.queries[numbers.reshape(-1)], query_shape=tuple(numbers.shape))


class _Questions:
    """Questions that attention and contributions share: they differ in what is ranked and summed."""

    def __init__(self, focus: Focus, scorer: Scorer) -> None:
        self._focus, self._scorer = focus, scorer

    @property
    def query_shape(self) -> tuple[int, ...]:
        """The leading dimensions of the layer's input that became queries."""
        return self._focus.query_shape

    @overload
    def top(
        self, k: int, *, by: None = None, within: Columns | None = None, order: str = "largest", absolute: bool = False
    ) -> TopEvents: ...

    @overload
    def top(
        self, k: int, *, by: Columns, within: None = None, order: str = "largest", absolute: bool = False
    ) -> TopGroups: ...

    def top(
        self,
        k: int,
        *,
        by: Columns | None = None,
        within: Columns | None = None,
        order: str = "largest",
        absolute: bool = False,
    ) -> TopEvents | TopGroups:
        """The k best events of every query; `within` a column: of every group; `by` a column: the k best groups.

        Order: score descending, then event ascending. `order="absolute"` ranks by magnitude; `absolute=True`
        sums magnitudes (only with `by`). Fewer than k: padded with event −1 and score NaN.
        """
        k = check_count(k, len(self._focus.queries))
        check_order(order)
        if by is not None and within is not None:
            raise BadQuery("top takes by or within, not both.")
        if absolute and by is None:
            raise BadQuery("absolute=True sums magnitudes and needs by=…; to rank by magnitude use order='absolute'.")
        if by is not None:
            return self._top_groups(k, Grouping.by(self._focus.memory, by), order, absolute)
        if within is None:
            reducer: Top | TopWithin = Top(self._scorer, k, order)
            groups = None
        else:
            grouping = Grouping.by(self._focus.memory, within)
            reducer, groups = TopWithin(self._scorer, k, order, grouping), grouping.groups
        rows = self._focus.reduce(reducer)
        scores, numbers = reducer.result()
        fields = dict(zip(Top.FIELDS, numbers.unbind(-1), strict=True))
        explanation = Explanation("full scan", rows, int(reducer.nan.sum()))
        return TopEvents(scores=scores, explanation=explanation, groups=groups, **fields)

    def _top_groups(self, k: int, grouping: Grouping, order: str, absolute: bool) -> TopGroups:
        reducer = GroupSums(self._scorer, grouping, absolute)
        rows = self._focus.reduce(reducer)
        sums, counts = reducer.result()
        keys = rank_keys(torch.where(counts > 0, sums, torch.nan), order)
        best = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
        found = counts[best] > 0
        scores = torch.where(found, sums.gather(1, best), torch.nan)
        pad = max(k - scores.shape[1], 0)
        groups = [[grouping.groups[g] if counts[g] > 0 else None for g in row] + [None] * pad for row in best.tolist()]
        return TopGroups(
            groups=groups,
            scores=torch.nn.functional.pad(scores, (0, pad), value=torch.nan),
            counts=torch.nn.functional.pad(counts[best], (0, pad)),
            explanation=Explanation("sums over a full scan", rows),
        )

    def totals(self, *, by: Columns, absolute: bool = False) -> Totals:
        """Σ over the events of every group, in fp64; with `absolute` the sum of magnitudes."""
        grouping = Grouping.by(self._focus.memory, by)
        reducer = GroupSums(self._scorer, grouping, absolute)
        rows = self._focus.reduce(reducer)
        return Totals(grouping.groups, reducer.result()[0], Explanation("sums over a full scan", rows))

    def scores(self) -> Float32[Tensor, "queries events"]:
        """All scores, [queries, T]; refused where they would not fit in 1 GB."""
        events = self._events()
        size = 4 * events * len(self._focus.queries)
        if size > SCORES_BYTES:
            raise BadQuery(
                f"all scores of {len(self._focus.queries):,} queries over {events:,} events take {size / 1e9:.1f} GB. "
                "Ask for fewer queries (attention[:10]), or for top(…) or totals(…)."
            )
        reducer = AllScores(self._scorer)
        self._focus.reduce(reducer)
        return reducer.result()

    def _events(self) -> int:
        if self._focus.selection:
            return sum(len(block) for block in self._focus.blocks())
        return self._focus.memory.events(self._focus.weight, self._focus.until)


class Attention(_Questions):
    """The attention of some queries over the events of one layer's weight: α_t = x_t · q."""

    def __init__(self, focus: Focus) -> None:
        super().__init__(focus, AttentionScorer(focus.queries))

    @property
    def queries(self) -> Float[Tensor, "queries dim_in"]:
        """The layer's inputs for the test examples, a row each."""
        return self._focus.queries

    @property
    def uses(self) -> list[str]:
        """The maps through which events reached this weight; `.uses` of a result are indices into this list."""
        return [use.map for use in self._focus.memory.manifest.weights[self._focus.weight].uses]

    def __len__(self) -> int:
        return len(self._focus.queries)

    def __getitem__(self, index: Any) -> Attention:
        """Some of the queries, by an index into `query_shape`: attention[..., -1]."""
        return Attention(self._focus.picked(index))

    def where(self, **columns: Any) -> Attention:
        """Only events whose columns have these values (a value, a list, a slice, or a mask over examples)."""
        return Attention(self._focus.narrowed(columns))

    def contributions(self, unit: int | Tensor | None = None, direction: Any = None) -> Contributions:
        """What each event adds to the output: to a unit, along a direction, or (neither given) as a whole vector.

        A tensor of units, or of directions [..., dim_out], gives every query its own: its shape is `query_shape`.
        """
        return Contributions.of(self._focus, unit, direction)

    def output(self, kernel: Kernel | None = None) -> Float64[Tensor, "*query_shape dim_out"]:
        """The layer's output rebuilt: initial() + Σ contributions (Eq. 13), in fp64.

        A `kernel` ("softmax", or a function of blocks of scores) replaces the scores (Remark 3.2).
        """
        focus = self._focus
        require_values(focus.memory, focus.weight, "output()")
        reducer = output_reducer(kernel, focus.queries, _coefficients(focus), self._dim_out)
        focus.reduce(reducer)
        return self.initial() + self._shaped(reducer.result())

    def initial(self) -> Float64[Tensor, "*query_shape dim_out"]:
        """The part of the output that no event of this weight made: c_0 W0 q + c^b_0 b_0 (and the old velocity's)."""
        focus = self._focus
        require_values(focus.memory, focus.weight, "initial()")
        folds = Folds(focus.memory)
        record = focus.memory.manifest.weights[focus.weight]
        result = focus.queries.double() @ folds.untouched(record.name, focus.until).T
        bias = record.uses[focus.use].bias
        if bias is not None:
            result = result + folds.untouched(bias, focus.until)
            for other, owner in enumerate(focus.memory.manifest.weights):
                # A bias shared with a layer of another weight was also moved by that weight's events.
                if other != focus.weight and any(use.bias == bias for use in owner.uses):
                    result = result + fold(focus.memory, other, focus.until, focus.selection)[1][bias]
        return self._shaped(result)

    @property
    def _dim_out(self) -> int:
        return self._focus.memory.manifest.weights[self._focus.weight].dim_out

    def _shaped(self, rows: Float64[Tensor, "queries dim_out"]) -> Float64[Tensor, "*query_shape dim_out"]:
        return rows.reshape(*self.query_shape, self._dim_out)

    def __repr__(self) -> str:
        record = self._focus.memory.manifest.weights[self._focus.weight]
        name = record.uses[self._focus.use].map
        chosen = " chosen by where()" if self._focus.selection else ""
        return f"Attention({name!r}: {len(self)} queries over {self._events():,} events{chosen} of {record.name})"


class Contributions(_Questions):
    """What events add to the output, signed; the same questions as for attention."""

    @classmethod
    def of(cls, focus: Focus, unit: int | Tensor | None, direction: Any) -> Contributions:
        """Contributions to a unit, along a direction, or (neither given) as vectors."""
        require_values(focus.memory, focus.weight, "contributions()")
        dim_out = focus.memory.manifest.weights[focus.weight].dim_out
        if unit is not None and direction is not None:
            raise BadQuery("contributions takes a unit or a direction, not both.")
        if unit is not None:
            direction = _onehot(unit, dim_out)
        if direction is None:
            return cls(focus, NormScorer(focus.queries, _coefficients(focus)))
        try:
            vectors = torch.as_tensor(direction)
            vectors = vectors.double() if not vectors.is_complex() else torch.empty(0)
        except (TypeError, ValueError, RuntimeError):
            vectors = torch.empty(0)
        if vectors.shape not in ((dim_out,), (*focus.query_shape, dim_out)):
            raise BadQuery(
                f"direction must have shape [{dim_out}], the layer's outputs, or {[*focus.query_shape, dim_out]} for "
                f"one a query, not {list(vectors.shape)}."
            )
        return cls(focus, DirectionScorer(focus.queries, _coefficients(focus), vectors.reshape(-1, dim_out)))

    def where(self, **columns: Any) -> Contributions:
        """Only events whose columns have these values."""
        return Contributions(self._focus.narrowed(columns), self._scorer)

    def totals(self, *, by: Columns, absolute: bool = False) -> Totals:
        """Σ over the events of every group: [queries, groups], or whole vectors without a unit or direction."""
        if not isinstance(self._scorer, NormScorer):
            return super().totals(by=by, absolute=absolute)
        if absolute:
            raise BadQuery("absolute=True needs contributions to a unit or along a direction.")
        grouping = Grouping.by(self._focus.memory, by)
        dim_out = self._focus.memory.manifest.weights[self._focus.weight].dim_out
        reducer = VectorSums(self._scorer, grouping, dim_out)
        rows = self._focus.reduce(reducer)
        return Totals(grouping.groups, reducer.result(), Explanation("sums over a full scan", rows))


def _onehot(unit: int | Tensor, dim_out: int) -> Float64[Tensor, "*query_shape dim_out"]:
    try:
        units = torch.as_tensor(unit)
    except (TypeError, ValueError, RuntimeError):
        units = torch.empty(0)
    units = units.to(torch.int64) if units.dtype in (torch.int32, torch.int16, torch.uint8, torch.int8) else units
    if units.dtype != torch.int64 or bool(((units < 0) | (units >= dim_out)).any()):
        raise BadQuery(f"unit must be a whole number from 0 to {dim_out - 1}, or a tensor of them, not {unit!r}.")
    return torch.nn.functional.one_hot(units, dim_out).double()


def _coefficients(focus: Focus) -> Coefficients:
    bias = focus.memory.manifest.weights[focus.weight].uses[focus.use].bias
    return Coefficients.of(focus.memory, focus.weight, bias, focus.until)


class Spotlight:
    """The attention of some inputs in every recorded layer, by the layer's name."""

    def __init__(self, attentions: dict[str, Attention], order: Sequence[str], find: Callable[[str], str]) -> None:
        self._attentions, self._order, self._find = attentions, order, find

    def __getitem__(self, layer: str) -> Attention:
        name = self._find(layer)
        if name not in self._attentions:
            raise BadQuery(f"{layer!r} was not called by the model in this forward pass; called: {', '.join(self)}.")
        return self._attentions[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._order if name in self._attentions)

    def __len__(self) -> int:
        return len(self._attentions)

    def __repr__(self) -> str:
        return "Spotlight(\n" + "".join(f"  {self._attentions[name]!r}\n" for name in self) + ")"
