"""Key sums of every segment, kept between questions: the sums up to any step are those of whole segments and a rest."""

from __future__ import annotations

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

    def until(self, until: int) -> tuple[Summed, int]:
        """The sums up to a step, added by segment in the order of segments, and how many rows were read for it."""
        total, rows = self._empty(), 0
        for number, segment in enumerate(self._memory.manifest.segments):
            if segment.first_step > until or not segment.events[self._weight]:
                continue
            part = self._whole.get(number)
            if part is None:
                part = self._empty()
                last = min(segment.last_step, until)
                for block in self._memory.blocks(self._weight, last, since=segment.first_step - 1):
                    part.update(block)
                    rows += len(block)
                if segment.last_step <= until:
                    self._whole[number] = part
            total.merge(part)
        return total.result(), rows

    def _empty(self) -> KeySums:
        memory, weight = self._memory, self._weight
        return KeySums(self._grouping, memory.manifest.weights[weight].dim_in, memory.manifest.events(weight))


def segment_sums(memory: StoredMemory, weight: int, grouping: Grouping) -> SegmentSums | None:
    """The sums of a grouping, kept in the memory's room; None where there are too many groups for that."""
    if len(grouping.groups) > MOST:
        return None
    key = ("segment sums", weight, grouping.key)
    return memory.room.get(key, lambda: SegmentSums(memory, weight, grouping), lambda made: made.bytes)
