"""The ledger's loop over keys, one after the other: plain here, and compiled in xxh3.py for those who have numba."""

from __future__ import annotations

from typing import Any, no_type_check


@no_type_check
def enter_rows(slots: Any, hashes: Any, number: Any, hash_of: Any, stored: int, numbers: Any) -> tuple[int, int, int]:
    """The number under which each key is stored; how many are stored then, and how many were compared and found.

    `number` and `hash_of` are what is known of the last key stored for every slot, and are kept up to date. A key
    without a slot, −1, is always new. `numbers` of keys that are stored already come out as −1 − number.
    """
    tries = matches = 0
    for at in range(len(slots)):
        slot = slots[at]
        if slot >= 0 and number[slot] >= 0:
            tries += 1
            if hash_of[slot, 0] == hashes[at, 0] and hash_of[slot, 1] == hashes[at, 1]:
                matches += 1
                numbers[at] = -1 - number[slot]
                continue
        if slot >= 0:
            number[slot], hash_of[slot, 0], hash_of[slot, 1] = stored, hashes[at, 0], hashes[at, 1]
        numbers[at] = stored
        stored += 1
    return stored, tries, matches
