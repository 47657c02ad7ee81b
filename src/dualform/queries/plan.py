"""Plans: which way answers a question. What can be summed before it is multiplied is; the rest scans every event."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from dualform.queries.focus import Focus
from dualform.queries.linear import DirectionSums, FoldSums, KeySums, Summed
from dualform.queries.reducers import Adding, GroupSums, Reducer, VectorSums
from dualform.queries.repeated import are_repeated, counted_magnitudes, counted_sums, stored
from dualform.queries.results import Explanation, Totals
from dualform.queries.scorers import AttentionScorer, DirectionScorer, NormScorer, Scorer
from dualform.queries.segmentsums import segment_sums
from dualform.queries.selection import Grouping
from dualform.queries.sums import example_sums, has_example_sums

T = TypeVar("T")
S = TypeVar("S")
SCAN = "sums over a full scan"
FEW = 64  # groups whose sums are kept
QUERIES = 16  # a sum of weighted keys costs about as much as scanning for so many queries


@dataclass(frozen=True)
class Plan(Generic[T]):
    """How a question is answered: reducers that one pass over the selected events feeds, and what is made of them.

    Without reducers there is no pass. `finish` is told how many rows were read.
    """

    kind: type[T]
    focus: Focus
    reducers: tuple[Reducer, ...]
    finish: Callable[[int], T]

    def then(self, kind: type[S], make: Callable[[T], S]) -> Plan[S]:
        """A plan for something that is made of this one's answer."""
        return Plan(kind, self.focus, self.reducers, lambda rows: make(self.finish(rows)))


def run(plans: Sequence[Plan[Any]]) -> list[Any]:
    """Answer some questions; those about one weight and end step share one pass."""
    rows = [0] * len(plans)
    passes: dict[tuple[int, int, int], list[int]] = {}
    for at, plan in enumerate(plans):
        if plan.reducers:
            focus = plan.focus
            passes.setdefault((id(focus.memory), focus.weight, focus.until), []).append(at)
    for numbers in passes.values():
        for at, read in zip(numbers, _sweep([plans[at] for at in numbers]), strict=True):
            rows[at] = read
    return [plan.finish(read) for plan, read in zip(plans, rows, strict=True)]


def answer(plan: Plan[T]) -> T:
    """Answer one question now."""
    result: T = run([plan])[0]
    return result


def _sweep(plans: Sequence[Plan[Any]]) -> list[int]:
    """Feed the reducers of all plans; how many rows each was fed. Sums are added by segment, in order."""
    rows = [0] * len(plans)
    for blocks in plans[0].focus.segments():
        parts = [[r.fresh() if isinstance(r, Adding) else r for r in plan.reducers] for plan in plans]
        for block in blocks:
            for at, plan in enumerate(plans):
                chosen = plan.focus.selection.apply(block)
                rows[at] += len(chosen)
                for part in parts[at] if len(chosen) else ():
                    part.update(chosen)
        for plan, made in zip(plans, parts, strict=True):
            for whole, part in zip(plan.reducers, made, strict=True):
                if part is not whole:
                    whole.merge(part)
    return rows


@dataclass(frozen=True)
class GroupTotals:
    """Σ over the events of every group: `of` gives the sums of some of the queries."""

    counts: Int64[Tensor, " groups"]
    of: Callable[[Int64[Tensor, " some"]], Float64[Tensor, "some groups"]]
    explanation: Explanation


@dataclass(frozen=True)
class _Sums:
    """Sums that serve any query: query q is multiplied with those of number which[q], and has that bias added."""

    several: list[Summed]
    which: Int64[Tensor, " queries"]
    biases: Float64[Tensor, "several groups"] | None = None

    def times(self, queries: Float[Tensor, "queries dim_in"], some: Int64[Tensor, " some"]) -> Tensor:
        """The sums of some of the queries, [some, groups]."""
        if self.biases is None:
            return self.several[0].times(queries[some])
        result = torch.empty(len(some), self.biases.shape[1], dtype=torch.float64)
        for number in self.which[some].unique().tolist():
            here = self.which[some] == number
            result[here] = self.several[number].times(queries[some[here]]) + self.biases[number]
        return result


@dataclass(frozen=True)
class _Way:
    """How sums are made: the reducers they need, and, once these are fed, the sums and how many more rows were read."""

    name: str
    reducers: tuple[Reducer, ...]
    sums: Callable[[], tuple[_Sums, int]]


def group_totals(
    focus: Focus, scorer: Scorer, grouping: Grouping, absolute: bool, tiled: bool = False
) -> Plan[GroupTotals]:
    """Σ over the events of every group, signed or of magnitudes; `tiled` where not all are wanted at once.

    Queries with NaN or infinity, and for magnitudes those with a negative entry, are scanned for.
    """
    usable = focus.queries.isfinite().all(dim=1)
    if absolute:
        usable &= (focus.queries >= 0).all(dim=1)
    way = _way(focus, scorer, grouping, absolute) if bool(usable.any()) else None
    if way is None:
        return _scanned(focus, scorer, grouping, absolute, tiled)
    others = int((~usable).sum())
    rest = _scanned(*_part(focus, scorer, ~usable), grouping, absolute, tiled) if others else None

    def finish(rows: int) -> GroupTotals:
        sums, others_read = way.sums()
        rows += others_read
        if not all(one.finite and (one.nonnegative or not absolute) for one in sums.several):
            # An infinity spreads otherwise in a sum, and magnitudes need the sign of every single score.
            scan = answer(_scanned(focus, scorer, grouping, absolute, tiled))
            more = Explanation(scan.explanation.way, scan.explanation.rows + rows)
            return dataclasses.replace(scan, explanation=more)
        counts = sums.several[0].counts
        if rest is None:
            return GroupTotals(counts, lambda some: sums.times(focus.queries, some), Explanation(way.name, rows))
        scanned = rest.finish(rows)

        def of(some: Int64[Tensor, " some"]) -> Float64[Tensor, "some groups"]:
            result = torch.empty(len(some), len(counts), dtype=torch.float64)
            here = usable[some]
            result[here] = sums.times(focus.queries, some[here])
            result[~here] = scanned.of(((~usable).cumsum(0) - 1)[some[~here]])
            return result

        name = f"{way.name}, for {others:,} of the queries a full scan"
        return GroupTotals(counts, of, Explanation(name, rows))

    return Plan(GroupTotals, focus, (*way.reducers, *(rest.reducers if rest else ())), finish)


def _way(focus: Focus, scorer: Scorer, grouping: Grouping, absolute: bool) -> _Way | None:
    """The sums that answer a question; None where only a scan does, or where they would take too much room."""
    if isinstance(scorer, AttentionScorer):
        return None if absolute and _first_has_negatives(focus) else _key_sums(focus, grouping)
    if not isinstance(scorer, DirectionScorer) or absolute:
        return None
    directions, which = scorer.directions.unique(dim=0, return_inverse=True)
    pays = len(directions) * QUERIES <= len(focus.queries)
    if not pays or len(directions) * _size(focus, grouping) > focus.memory.resident // 2:
        return None
    events = focus.memory.manifest.events(focus.weight)
    along = DirectionSums(grouping, scorer.coefficients, directions, focus.record.dim_in, events)

    def sums() -> tuple[_Sums, int]:
        several, biases = along.result()
        return _Sums(several, which.expand(len(focus.queries)), biases), 0

    return _Way("sums of weighted keys", (along,), sums)


def _key_sums(focus: Focus, grouping: Grouping) -> _Way | None:
    """Σ x_t of every group: from those of every example, from the repeated keys, or in one pass."""
    memory, everyone = focus.memory, torch.zeros(len(focus.queries), dtype=torch.int64)
    whole = focus.until == memory.steps and grouping.by_example and focus.selection.by_example
    if whole and has_example_sums(memory, focus.weight):

        def from_examples() -> tuple[_Sums, int]:
            # Those of a few groups are kept by themselves: they are small, and the sums of all examples are not.
            key, few = ("grouped", focus.weight, grouping.key), len(grouping.groups) <= FEW and not focus.selection
            summed: Summed | None = memory.room.find(key) if few else None
            if summed is None:
                kept = example_sums(memory, focus.weight)
                assert kept is not None
                summed = kept.grouped(focus.selection, grouping)
                if few:
                    memory.room.keep(key, summed, summed.sums.nbytes)
            return _Sums([summed], everyone), memory.manifest.examples + 1

        return _Way("key sums per example", (), from_examples)
    if _size(focus, grouping) > memory.resident // 2:
        return None
    if are_repeated(focus):
        return _Way(
            "sums of repeated keys",
            (),
            lambda: (_Sums([counted_sums(focus, grouping)], everyone), stored(focus)),
        )
    kept = None if focus.selection else segment_sums(memory, focus.weight, grouping)
    if kept is None:
        keys = KeySums(grouping, focus.record.dim_in, memory.manifest.events(focus.weight))
        return _Way("key sums", (keys,), lambda: (_Sums([keys.result()], everyone), 0))
    if not kept.covers(focus.until):
        passing = kept.reducer(focus.until)

        def from_pass() -> tuple[_Sums, int]:
            segment_sums(memory, focus.weight, grouping)  # it has grown
            return _Sums([passing.result()], everyone), 0

        return _Way("key sums", (passing,), from_pass)

    def from_segments() -> tuple[_Sums, int]:
        summed, rows = kept.until(focus.until)
        return _Sums([summed], everyone), rows

    return _Way("key sums of segments", (), from_segments)


def _size(focus: Focus, grouping: Grouping) -> int:
    """The bytes of a row of keys for every group that may have events."""
    return 8 * min(len(grouping.groups), focus.memory.manifest.events(focus.weight)) * focus.record.dim_in


def _first_has_negatives(focus: Focus) -> bool:
    """Whether a look at the first block already shows that scores have both signs."""
    block = next(iter(focus.memory.blocks(focus.weight, focus.until)), None)
    return block is not None and not bool(block.keys.amin() >= 0)


def _part(focus: Focus, scorer: Scorer, chosen: Bool[Tensor, " queries"]) -> tuple[Focus, Scorer]:
    """The same for some of the queries."""
    part = _queries(focus, chosen)
    changed: dict[str, Any] = {"queries": part.queries}
    if isinstance(scorer, DirectionScorer) and len(scorer.directions) == len(chosen):
        changed["directions"] = scorer.directions[chosen]
    return part, dataclasses.replace(scorer, **changed)  # type: ignore[type-var]


def _queries(focus: Focus, chosen: Tensor) -> Focus:
    queries = focus.queries[chosen]
    return dataclasses.replace(focus, queries=queries, query_shape=(len(queries),))


def _scanned(focus: Focus, scorer: Scorer, grouping: Grouping, absolute: bool, tiled: bool) -> Plan[GroupTotals]:
    """The sums from every single score; where all at once would take too much room, a pass for each tile."""
    if absolute and isinstance(scorer, AttentionScorer) and are_repeated(focus):
        return _counted(focus, grouping, tiled)
    apart = tiled and 8 * len(focus.queries) * len(grouping.groups) > focus.memory.resident // 4
    nobody = torch.zeros(len(focus.queries), dtype=torch.bool)
    reducer = GroupSums(_part(focus, scorer, nobody)[1] if apart else scorer, grouping, absolute)

    def of(some: Int64[Tensor, " some"]) -> Float64[Tensor, "some groups"]:
        if not apart:
            return reducer.sums[some]
        chosen = nobody.index_fill(0, some, True)
        found = answer(_scanned(*_part(focus, scorer, chosen), grouping, absolute, tiled=False))
        return found.of((chosen.cumsum(0) - 1)[some])

    def finish(rows: int) -> GroupTotals:
        return GroupTotals(reducer.counts, of, Explanation(SCAN, rows))

    return Plan(GroupTotals, focus, (reducer,), finish)


def _counted(focus: Focus, grouping: Grouping, tiled: bool) -> Plan[GroupTotals]:
    """Magnitudes of repeated keys: the score of each is summed as often as it occurs."""
    apart = tiled and 8 * len(focus.queries) * len(grouping.groups) > focus.memory.resident // 4

    def finish(rows: int) -> GroupTotals:
        nobody = torch.empty(0, dtype=torch.int64)
        sums, counts = counted_magnitudes(_queries(focus, nobody) if apart else focus, grouping)

        def of(some: Int64[Tensor, " some"]) -> Float64[Tensor, "some groups"]:
            return counted_magnitudes(_queries(focus, some), grouping)[0] if apart else sums[some]

        return GroupTotals(counts, of, Explanation("scores of repeated keys", stored(focus)))

    return Plan(GroupTotals, focus, (), finish)


def vector_totals(focus: Focus, scorer: NormScorer, grouping: Grouping) -> Plan[Totals]:
    """What each group adds to the output: by folding the events of each into a weight, or by a scan."""
    dim_out, dim_in, groups = focus.record.dim_out, focus.record.dim_in, len(grouping.groups)
    events, queries = focus.memory.manifest.events(focus.weight), len(focus.queries)
    folding = (events + queries * groups) * dim_in * dim_out
    fits = 8 * groups * dim_out * dim_in <= focus.memory.resident // 4
    if not fits or folding >= events * queries * (dim_in + dim_out):
        return _scanned_vectors(focus, scorer, grouping)
    folded = FoldSums(grouping, scorer.coefficients, dim_out, dim_in)

    def finish(rows: int) -> Totals:
        if not finite(*folded.result(), focus.queries):
            return answer(_scanned_vectors(focus, scorer, grouping))
        flat = focus.queries.double() @ folded.weights.reshape(groups * dim_out, dim_in).T
        values = flat.reshape(queries, groups, dim_out) + folded.biases
        return Totals(grouping.groups, values, Explanation("events folded into a weight for each group", rows))

    return Plan(Totals, focus, (folded,), finish)


def _scanned_vectors(focus: Focus, scorer: NormScorer, grouping: Grouping) -> Plan[Totals]:
    reducer = VectorSums(scorer, grouping, focus.record.dim_out)
    return Plan(Totals, focus, (reducer,), lambda rows: Totals(grouping.groups, reducer.sums, Explanation(SCAN, rows)))


def finite(*tensors: Tensor) -> bool:
    """Whether no tensor holds NaN or an infinity."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
