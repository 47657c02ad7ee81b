"""What questions about the best of a memory look at: views of its shadows, the events' numbers, keys at hand.

All of it lies in the memory's room, and is made anew when it is asked for again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import xxhash
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from dualform.memory import StoredMemory
from dualform.queries.coarse import Coarse
from dualform.queries.hot import HotKeys
from dualform.queries.scorers import DirectionScorer, NormScorer
from dualform.queries.shadow import Shadow, widened
from dualform.queries.shadows import BLOCK, Shadows, Span
from dualform.queries.table import BYTES, Table
from dualform.queries.views import View

Values = tuple[Float64[Tensor, "directions events"], Float64[Tensor, " events"], Float64[Tensor, " events"]]
Chosen = Bool[Tensor, " rows"] | None
Question = tuple[object, ...]


class Index:
    """The index of one memory."""

    def __init__(self, memory: StoredMemory) -> None:
        self._owner = weakref.ref(memory)
        self._lock = threading.RLock()
        self._shadows = Shadows(memory)
        self._spans: dict[int, list[Span]] = {}
        self._odd: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    @property
    def _memory(self) -> StoredMemory:
        memory = self._owner()
        assert memory is not None, "an index is asked through its memory"
        return memory

    def keys(self, weight: int) -> int:
        """How many keys of a weight are stored."""
        if weight not in self._counts:
            self._counts[weight] = sum(record.keys[weight] for record in self._memory.manifest.segments)
        return self._counts[weight]

    def table(self, weight: int) -> Table:
        """The numbers of every event of a weight."""
        room = self._memory.room
        return room.get(("table", weight), lambda: Table.of(self._memory, weight), lambda table: BYTES * len(table))

    def hot(self, weight: int) -> HotKeys:
        """The keys of a weight, of which some are at hand."""
        most = self._memory.resident // 16

        def make() -> HotKeys:
            hot = HotKeys(self._memory, weight, self.norms(weight), most)
            for span in self.spans(weight):
                shadow = self._shadow(weight, span)
                hot.fix(shadow.numbers[: len(shadow.front)], shadow.front)
            return hot

        return self._memory.room.get(("hot", weight), make, lambda hot: most)

    def spans(self, weight: int, progress: bool = False) -> list[Span]:
        """The segments that each shadow of a weight covers, those with the largest norms first."""
        with self._lock:
            if weight not in self._spans:
                spans = self._shadows.spans(weight)
                scales: dict[Span, float] = {}
                odd: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
                for span in spans:
                    shadow = self._shadow(weight, span, progress)
                    scales[span] = shadow.scale
                    odd.append(shadow.odd.clone())
                self._odd[weight] = torch.cat(odd)
                self._spans[weight] = sorted(spans, key=lambda span: -scales[span])
            return self._spans[weight]

    def odd(self, weight: int) -> Int64[Tensor, " odd"]:
        """The keys of a weight that hold NaN or infinity, or whose norm is too large."""
        self.spans(weight)
        return self._odd[weight]

    def view(self, weight: int, span: Span, chosen: Chosen = None) -> View:
        """The keys of some segments, or those of them that are chosen among all keys."""
        shadow = self._shadow(weight, span)

        def make() -> View:
            return View.of(shadow, None if chosen is None else chosen[shadow.numbers])

        key = ("view", weight, span, _digest(chosen))
        return self._memory.room.get(key, make, View.size, needs=("shadow", weight, span))

    def _shadow(self, weight: int, span: Span, progress: bool = False) -> Shadow:
        key = ("shadow", weight, span)
        return self._memory.room.get(key, lambda: self._shadows.get(weight, span, progress), Shadow.size)

    def shadows(self, weight: int, progress: bool = False) -> Iterator[Shadow]:
        """The shadows of a weight's keys, one after the other; made where they are missing."""
        return (self._shadow(weight, span, progress) for span in self.spans(weight, progress))

    def has_coarse(self, weight: int) -> bool:
        """Whether there is room for all keys of a weight in bytes."""
        return self.keys(weight) * (self._memory.manifest.weights[weight].dim_in + 8) <= self._memory.resident // 3

    def coarse(self, weight: int) -> Iterator[Coarse]:
        """All keys of a weight in bytes; made where they are missing."""
        for span in sorted(self.spans(weight), key=lambda span: span.start):
            key = ("coarse", weight, span)
            yield self._memory.room.get(key, partial(self._shadows.coarse, weight, span), Coarse.size)

    def are_kept(self, weight: int) -> bool:
        """Whether the shadows of a weight's keys are on disk."""
        return set(self.spans(weight)) <= set(self._shadows.stored(weight))

    def weighted(
        self, question: Question, span: Span, chosen: Chosen, make: Callable[[Shadow], View | None]
    ) -> View | None:
        """The events of some segments as a question weighs them, all or those that are chosen."""
        weight = question[0]
        assert isinstance(weight, int)
        shadow = self._shadow(weight, span)

        def size(view: View | None) -> int:
            return 0 if view is None else view.size()

        key = ("weighted", *question, span, _digest(chosen))
        return self._memory.room.get(key, lambda: make(shadow), size, needs=("shadow", weight, span))

    def of_examples(self, weight: int, sums: Float64[Tensor, "examples dim_in"]) -> Shadow:
        """The shadow of a weight's key sums per example."""
        key = ("shadow of sums", weight)
        return self._memory.room.get(key, lambda: self._shadows.of_examples(weight, sums), Shadow.size)

    def norms(self, weight: int) -> Float32[Tensor, " keys"]:
        """A number not below the norm of every key, by the key's number; infinite for those set apart."""

        def make() -> Tensor:
            norms = torch.full((self.keys(weight),), torch.inf)
            for shadow in self.shadows(weight):
                norms[shadow.numbers] = widened(shadow.norms.double() * shadow.scale)
            return norms

        return self._memory.room.get(("norms", weight), make, lambda norms: norms.nbytes)

    def tiles(self, weight: int, read: bool = False) -> Iterator[tuple[int, Float[Tensor, "rows dim_in"]]]:
        """Every stored key, with the number of the first; each tile is there until the next one is asked for.

        With `read`, keys that cannot stay mapped are read instead: better where little is done with them.
        """
        for file, record in self._memory.segments:
            wide = 8 * self._memory.manifest.weights[weight].dim_in
            rows = max(self._memory.resident // 16 // wide, min(BLOCK, self._memory.block_rows(weight)))
            if record.keys[weight]:
                for at, keys in file.tiles(f"w{weight}/keys", rows, read):
                    yield at + record.first_keys[weight], keys

    def values(self, weight: int, until: int, scorer: DirectionScorer | NormScorer) -> Values:
        """What the scorer makes of every gradient of a weight, a row a direction, and the events' coefficients."""
        room = self._memory.room
        key = ("coefficients", weight, until, scorer.coefficients.bias_uses, scorer.coefficients.bias is None)
        pair = room.get(
            key,
            lambda: scorer.coefficients.of_events(self.table(weight).block),
            lambda pair: pair[0].nbytes + pair[1].nbytes,
        )
        return self._along(weight, scorer), *pair

    def _along(self, weight: int, scorer: DirectionScorer | NormScorer) -> Float64[Tensor, "directions events"]:
        """One pass over the gradients for all directions that are not at hand."""
        room = self._memory.room
        rows = scorer.directions if isinstance(scorer, DirectionScorer) else [None]
        keys = [("along", weight, None if row is None else row.numpy().tobytes()) for row in rows]
        found: list[Tensor | None] = [room.find(key) for key in keys]
        missing = [at for at, row in enumerate(found) if row is None]
        if missing:
            some = scorer
            if isinstance(scorer, DirectionScorer):
                some = replace(scorer, directions=scorer.directions[missing])
            parts = [some.of_gradients(block) for block in self._memory.blocks(weight, self._memory.steps)]
            made = torch.cat([torch.empty(len(missing), 0, dtype=torch.float64), *parts], dim=1)
            for at, row in zip(missing, made.unbind(), strict=True):
                found[at] = row.clone()
                room.keep(keys[at], found[at], row.nbytes)
        return torch.stack([row for row in found if row is not None])

    def question(self, weight: int, until: int, scorer: DirectionScorer | NormScorer) -> Question:
        """What the values of events depend on."""
        along = scorer.directions.numpy().tobytes() if isinstance(scorer, DirectionScorer) else b""
        coefficients = scorer.coefficients
        return weight, until, along, coefficients.bias_uses, coefficients.bias is None


def _digest(chosen: Chosen) -> bytes:
    return b"" if chosen is None else xxhash.xxh3_128_digest(chosen.numpy().data)


_INDEXES: weakref.WeakKeyDictionary[StoredMemory, Index] = weakref.WeakKeyDictionary()


def index_of(memory: StoredMemory) -> Index:
    """The index of an opened memory, one for all questions."""
    found = _INDEXES.get(memory)
    return _INDEXES.setdefault(memory, Index(memory)) if found is None else found
