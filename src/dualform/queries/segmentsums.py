"""Key sums of every segment, kept between questions: the sums up to any step are those of whole segments and a rest."""

from __future__ import annotations

from collections.abc import Iterator

from dualform.memory import StoredMemory
from dualform.queries.linear import KeySums, Summed
from dualform.queries.selection import Grouping

MOST = 64  # groups


class SegmentSums:
    """Σ x_t of every group in every segment of a weight, as far as it was asked for."""

    def __init__(self, memory: StoredMemory, weight: int, grouping: Grouping) -> None:
        self._memory, self._weight, self._grouping = memory, weight, grouping
        self._whole: dict[int, KeySums] = {}

    @property
    def bytes(self) -> int:
        """What is kept."""
        return sum(part.rows.sums.nbytes + part.counts.nbytes for part in list(self._whole.values()))

    def covers(self, until: int) -> bool:
        """Whether segments that end up to a step are kept, all of them, so that only a rest is read."""
        ended = [number for number in self._segments(until) if self._ends(number, until)]
        return bool(ended) and all(number in self._whole for number in ended)

    def until(self, until: int) -> tuple[Summed, int]:
        """The sums up to a step, added by segment in the order of segments, and how many rows were read for it."""
        total, rows = self._empty(), 0
        for number in self._segments(until):
            part = self._whole.get(number) if self._ends(number, until) else None
            if part is None:
                part, segment = self._empty(), self._memory.manifest.segments[number]
                last = min(segment.last_step, until)
                for block in self._memory.blocks(self._weight, last, since=segment.first_step - 1):
                    part.update(block)
                    rows += len(block)
            total.merge(part)
        return total.result(), rows

    def reducer(self, until: int) -> KeptSums:
        """Key sums for a pass over all events up to a step, of which whole segments are kept."""
        return KeptSums(self, self._arguments, iter(self._segments(until)), until)

    def keep(self, number: int, part: KeySums, until: int) -> None:
        """Keep the sums of a segment, if it ends up to the step."""
        if self._ends(number, until):
            self._whole[number] = part

    def _segments(self, until: int) -> list[int]:
        """The segments that have events up to a step."""
        segments = enumerate(self._memory.manifest.segments)
        return [number for number, one in segments if one.first_step <= until and one.events[self._weight]]

    def _ends(self, number: int, until: int) -> bool:
        return self._memory.manifest.segments[number].last_step <= until

    @property
    def _arguments(self) -> tuple[Grouping, int, int]:
        manifest = self._memory.manifest
        return self._grouping, manifest.weights[self._weight].dim_in, manifest.events(self._weight)

    def _empty(self) -> KeySums:
        return KeySums(*self._arguments)


class KeptSums(KeySums):
    """Key sums that keep what they are given of every segment; they are given one segment after the other."""

    def __init__(self, sums: SegmentSums, arguments: tuple[Grouping, int, int], numbers: Iterator[int], until: int):
        super().__init__(*arguments)
        self._sums, self._numbers, self._until = sums, numbers, until

    def merge(self, other: KeySums) -> None:
        """Take in the sums of the next segment."""
        super().merge(other)
        self._sums.keep(next(self._numbers), other, self._until)


def segment_sums(memory: StoredMemory, weight: int, grouping: Grouping) -> SegmentSums | None:
    """The sums of a grouping, kept in the memory's room; None where there are too many groups for that."""
    if len(grouping.groups) > MOST:
        return None
    key = ("segment sums", weight, grouping.key)
    return memory.room.get(key, lambda: SegmentSums(memory, weight, grouping), lambda made: made.bytes)
