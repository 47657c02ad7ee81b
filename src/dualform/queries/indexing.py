"""Making the index of a memory now, instead of at the first question."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dualform.memory import StoredMemory
from dualform.queries.attend import find_map, uses_of
from dualform.queries.index import index_of


def build_index(memory: StoredMemory, layers: Sequence[str], progress: bool = False) -> list[str]:
    """Make the shadows of some layers, all by default; a sentence for each weight."""
    memory.require_events()
    uses = uses_of(memory)
    weights = sorted({uses[find_map(memory, layer)][0] for layer in layers or uses})
    told: list[str] = []
    for weight in weights:
        start = time.monotonic()
        rows, size = 0, 0
        for shadow in index_of(memory).shadows(weight, progress):
            rows, size = rows + len(shadow), size + shadow.size()
        name = memory.manifest.weights[weight].name
        kept = "" if index_of(memory).are_kept(weight) else ", but they cannot be written and are not kept"
        told.append(f"{name}: {rows:,} keys indexed, {size / 1e6:,.1f} MB, {time.monotonic() - start:.1f} s{kept}")
    return told
