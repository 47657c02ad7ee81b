"""The spotlight: the scores of some queries over a memory, and what is read off them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dualform.errors import BadQuery
from dualform.queries.focus import Focus
from dualform.queries.kernels import Kernel
from dualform.queries.outputs import initial_plan, output_plan
from dualform.queries.plan import GroupTotals, Plan, group_totals, vector_totals
from dualform.queries.reducers import AllScores, check_count, check_order
from dualform.queries.results import Timeline, TopEvents, TopGroups, Totals
from dualform.queries.scorers import AttentionScorer, DirectionScorer, NormScorer, Scorer
from dualform.queries.selection import Grouping
from dualform.queries.together import ask
from dualform.queries.tops import top_events, top_groups
from dualform.queries.values import require_values

Columns = str | tuple[str, ...]
SCORES_BYTES = 1 << 30


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
            grouping = Grouping.by(self._focus.memory, by)
            return ask(top_groups(self._focus, self._scorer, k, order, grouping, absolute))
        groups = None if within is None else Grouping.by(self._focus.memory, within)
        return ask(top_events(self._focus, self._scorer, k, order, groups))

    def totals(self, *, by: Columns, absolute: bool = False) -> Totals:
        """Σ over the events of every group, in fp64; with `absolute` the sum of magnitudes."""
        grouping = Grouping.by(self._focus.memory, by)
        everyone = torch.arange(len(self._focus.queries))

        def make(totals: GroupTotals) -> Totals:
            return Totals(grouping.groups, totals.of(everyone), totals.explanation)

        return ask(group_totals(self._focus, self._scorer, grouping, absolute).then(Totals, make))

    def timeline(self, bins: int = 50, *, absolute: bool = False) -> Timeline:
        """How the sum over all events spreads over training: Σ over the events of stretches of equally many steps.

        There are never more bins than steps. Contributions as whole vectors are summed by their size |α_t| ‖e_t‖.
        """
        bins = min(check_count(bins, 1, "bins"), self._focus.until)
        edges = 1 + torch.arange(bins + 1) * self._focus.until // max(bins, 1)
        everyone = torch.arange(len(self._focus.queries))

        def make(totals: GroupTotals) -> Timeline:
            return Timeline(edges, totals.of(everyone), totals.counts, totals.explanation)

        plan = group_totals(self._focus, self._scorer, Grouping.of_steps(edges), absolute)
        return ask(plan.then(Timeline, make))

    def scores(self) -> Tensor:
        """All scores, [queries, T]; refused where they would not fit in 1 GB."""
        events = self._events()
        size = 4 * events * len(self._focus.queries)
        if size > SCORES_BYTES:
            raise BadQuery(
                f"all scores of {len(self._focus.queries):,} queries over {events:,} events take {size / 1e9:.1f} GB. "
                "Ask for fewer queries (attention[:10]), or for top(…) or totals(…)."
            )
        reducer = AllScores(self._scorer)
        return ask(Plan(Tensor, self._focus, (reducer,), lambda rows: reducer.result()))

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

    def exclude(self, **columns: Any) -> Attention:
        """All events but those whose columns all have these values: the complement of `where`."""
        return Attention(self._focus.without(columns))

    def contributions(self, unit: int | Tensor | None = None, direction: Any = None) -> Contributions:
        """What each event adds to the output: to a unit, along a direction, or (neither given) as a whole vector.

        A tensor of units, or of directions [..., dim_out], gives every query its own: its shape is `query_shape`.
        """
        return Contributions.of(self._focus, unit, direction)

    def output(self, kernel: Kernel | None = None) -> Tensor:
        """The layer's output rebuilt: initial() + Σ contributions (Eq. 13), in fp64, [*query_shape, dim_out].

        A `kernel` ("softmax", or a function of blocks of scores) replaces the scores (Remark 3.2).
        """
        return ask(output_plan(self._focus, kernel))

    def initial(self) -> Tensor:
        """The part of the output that no event of this weight made: c_0 W0 q + c^b_0 b_0 (and the old velocity's)."""
        return ask(initial_plan(self._focus))

    def __repr__(self) -> str:
        record = self._focus.memory.manifest.weights[self._focus.weight]
        name = record.uses[self._focus.use].map
        chosen = " that were chosen" if self._focus.selection else ""
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
            return cls(focus, NormScorer(focus.queries, focus.coefficients))
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
        return cls(focus, DirectionScorer(focus.queries, focus.coefficients, vectors.reshape(-1, dim_out)))

    def where(self, **columns: Any) -> Contributions:
        """Only events whose columns have these values."""
        return Contributions(self._focus.narrowed(columns), self._scorer)

    def exclude(self, **columns: Any) -> Contributions:
        """All events but those whose columns all have these values."""
        return Contributions(self._focus.without(columns), self._scorer)

    def totals(self, *, by: Columns, absolute: bool = False) -> Totals:
        """Σ over the events of every group: [queries, groups], or whole vectors without a unit or direction."""
        if not isinstance(self._scorer, NormScorer):
            return super().totals(by=by, absolute=absolute)
        if absolute:
            raise BadQuery("absolute=True needs contributions to a unit or along a direction.")
        return ask(vector_totals(self._focus, self._scorer, Grouping.by(self._focus.memory, by)))


def _onehot(unit: int | Tensor, dim_out: int) -> Float64[Tensor, "*query_shape dim_out"]:
    try:
        units = torch.as_tensor(unit)
    except (TypeError, ValueError, RuntimeError):
        units = torch.empty(0)
    units = units.to(torch.int64) if units.dtype in (torch.int32, torch.int16, torch.uint8, torch.int8) else units
    if units.dtype != torch.int64 or bool(((units < 0) | (units >= dim_out)).any()):
        raise BadQuery(f"unit must be a whole number from 0 to {dim_out - 1}, or a tensor of them, not {unit!r}.")
    return torch.nn.functional.one_hot(units, dim_out).double()


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
