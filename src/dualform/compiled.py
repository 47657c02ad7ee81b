"""The loops over pairs that numba compiles: each number is read once. Threads take parts of a loop, without the GIL."""

from typing import Any, no_type_check

import numba
import numpy as np
from numba import types

from dualform.fast import LANES, SPANS

Array = np.ndarray[Any, Any]
GROUP = 16
CHUNK = 8  # blocks that a thread takes at a time
WIDTH0, WIDTH1, WIDTH2 = (stop - start for start, stop in SPANS)


# ssize_t pread(int descriptor, void *to, size_t bytes, off_t from)
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.intp, types.uintp, types.int64))


@numba.njit(cache=True, nogil=True)
@no_type_check
def read_rows(descriptor: int, places: Array, rows: Array) -> bool:
    """Fill every row with the bytes of a file from its place on; False where they could not all be read."""
    width = rows.shape[1]
    for row in range(len(places)):
        if _pread(descriptor, rows[row].ctypes.data, width, places[row]) != width:
            break
    else:
        return True
    return False


@numba.njit(cache=True, nogil=True)
@no_type_check
def above(bounds: Array, thresholds: Array, part: int, parts: int) -> tuple[Array, Array]:
    """The rows and columns where a bound is not below its column's threshold, in one part of the rows."""
    rows, columns = bounds.shape
    begin, end = rows * part // parts, rows * (part + 1) // parts
    # Room for every pair, of which only what is written to is ever backed by memory.
    at_row = np.empty((end - begin) * columns, np.int64)
    at_column = np.empty((end - begin) * columns, np.int64)
    at = 0
    for row in range(begin, end):
        for first in range(0, columns, GROUP):
            last = min(first + GROUP, columns)
            some = 0
            for column in range(first, last):
                some += bounds[row, column] >= thresholds[column]
            if some:
                for column in range(first, last):
                    if bounds[row, column] >= thresholds[column]:
                        at_row[at] = row
                        at_column[at] = column
                        at += 1
    return at_row[:at].copy(), at_column[:at].copy()


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def products(rows: Array, queries: Array, at_row: Array, at_query: Array, result: Array, part: int, parts: int) -> None:
    """The product of every pair of one part, summed in fp64."""
    width = rows.shape[1]
    pairs = len(at_row)
    for pair in range(pairs * part // parts, pairs * (part + 1) // parts):
        row = rows[at_row[pair]]
        query = queries[at_query[pair]]
        total = 0.0
        for at in range(width):
            total += np.float64(row[at]) * np.float64(query[at])
        result[pair] = total


@numba.njit(cache=True, nogil=True)
@no_type_check
def rounded(
    near: Array, row_norms: Array, query_norms: Array, at_row: Array, at_query: Array, error: float, tiny: float,
    result: Array, unsure: Array,
) -> int:  # fmt: skip
    """Products rounded to fp32, and which of them an error of that size could round otherwise; how many."""
    count = 0
    for pair in range(len(near)):
        value = near[pair] + 0.0
        wide = error * query_norms[at_query[pair]] * row_norms[at_row[pair]] + tiny
        result[pair] = value
        other = np.float32(value - wide) != np.float32(value + wide) or not np.isfinite(value)
        unsure[pair] = other
        count += other
    return count


@numba.njit(cache=True, nogil=True)
@no_type_check
def grown(values: Array, room: int) -> Array:
    """The same values with more room."""
    larger = np.empty(room, values.dtype)
    larger[: len(values)] = values
    return larger


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
@no_type_check
def cascade(
    level0: Array, level1: Array, level2: Array, fine: Array, rows: Array, sizes: Array, weights: Array, offsets: Array,
    asked0: Array, asked1: Array, asked2: Array, finely: Array, added: Array, thresholds: Array, reach: Array,
    begin: int, slack: float, spare: int, most: int, part: int, parts: int,
) -> tuple[bool, int, Array, Array, Array]:  # fmt: skip
    """The pairs of one part whose every bound reaches the threshold, with the last one, and how many were bounded.

    Rows stand in blocks of lanes, from `begin` on; queries in descending order of how far they reach. False where the
    fine bound is asked for too often to pay, or where more than `most` are left.
    """
    room = 4096
    at_row = np.empty(room, np.int64)
    at_query = np.empty(room, np.int64)
    bounds = np.empty(room, np.float32)
    count = len(sizes)
    width = fine.shape[1] - 2
    partial = np.empty(LANES, np.float32)
    bound = np.empty(LANES, np.float32)
    found, bounded, tried = 0, 0, 0
    active = len(thresholds)
    total = (reach[0] + LANES - 1) // LANES
    for chunk in range(begin // LANES + part * CHUNK, total, parts * CHUNK):
        for block in range(chunk, min(chunk + CHUNK, total)):
            start = block * LANES
            while active > 0 and reach[active - 1] <= start:
                active -= 1
            lanes0, lanes1, lanes2 = level0[block], level1[block], level2[block]
            extra = np.float32(slack * sizes[start])
            bounded += active * LANES
            if tried > spare // parts + bounded // 8:
                return False, bounded, at_row[:0], at_query[:0], bounds[:0]
            for query in range(active):
                enough = thresholds[query] - extra
                some = 0
                for j in range(LANES):
                    value = np.float32(0.0)
                    for column in range(WIDTH0):
                        value += lanes0[column, j] * asked0[query, column]
                    partial[j] = value
                    some |= value + lanes0[WIDTH0, j] * asked0[query, WIDTH0] >= enough
                if not some:
                    continue
                some = 0
                for j in range(LANES):
                    value = partial[j]
                    for column in range(WIDTH1):
                        value += lanes1[column, j] * asked1[query, column]
                    partial[j] = value
                    some |= value + lanes1[WIDTH1, j] * asked1[query, WIDTH1] >= enough
                if not some:
                    continue
                some = 0
                for j in range(LANES):
                    value = partial[j]
                    for column in range(WIDTH2):
                        value += lanes2[column, j] * asked2[query, column]
                    bound[j] = value + lanes2[WIDTH2, j] * asked2[query, WIDTH2]
                    some |= bound[j] >= enough
                if not some:
                    continue
                for j in range(min(LANES, count - start)):
                    if bound[j] < enough:
                        continue
                    place = start + j
                    row = rows[place] if len(rows) else place
                    value = np.float32(0.0)
                    for column in range(width):
                        value += fine[row, column] * finely[query, column]
                    rest = fine[row, width] * finely[query, width]
                    if len(weights):
                        value = weights[place] * value
                        rest = abs(weights[place]) * rest
                    if len(offsets):
                        value += offsets[place] * added[query]
                    value += rest + np.float32(slack) * sizes[place]
                    tried += 1
                    if value >= thresholds[query]:
                        if found == 1 + 2 * most // parts:
                            return False, bounded, at_row[:0], at_query[:0], bounds[:0]
                        if found == room:
                            room *= 4
                            at_row, at_query, bounds = grown(at_row, room), grown(at_query, room), grown(bounds, room)
                        at_row[found] = place
                        at_query[found] = query
                        bounds[found] = value
                        found += 1
    return True, bounded, at_row[:found].copy(), at_query[:found].copy(), bounds[:found].copy()
