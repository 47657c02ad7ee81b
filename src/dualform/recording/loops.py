"""The loops of the recorder that numba compiles: when they are loaded, so that nothing fails in the midst of a step.

What is to be done stands in a table of whole numbers, addresses among them, so that one call from Python does the work
of all layers, and torch's own threads share it: each takes the next part of its share, and then of the others', until
none is left. Which thread takes which part makes no difference to any result.
"""

import ctypes
import zlib
from functools import partial
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np

from dualform.memory import blocksums, xxh3
from dualform.memory.xxh3 import copy_blocks, hash_rows
from dualform.recording import intrinsics, jobs
from dualform.recording.intrinsics import (
    LINE,
    call,
    doubles,
    floats,
    in_threads,
    longs,
    put_line,
    take_next,
)
from dualform.recording.jobs import (
    CHANGING,
    COMPARE,
    COPY,
    FIELDS,
    HEAD,
    JOBS,
    PROJECT,
    SHARE_LINE,
    SHARED,
    SHARES,
    SPOILED,
    TAKE,
    THREADS,
    VERSION,
)

Array = np.ndarray[Any, Any]
FAST = {"reassoc", "contract"}
carray = numba.carray  # type: ignore[attr-defined]
_ZERO, _ONE, _NONE = np.float32(0.0), np.float32(1.0), np.float64(0.0)


@numba.njit(nogil=True, fastmath=FAST, error_model="numpy")
@no_type_check
def _multiply(rows: Array, columns: Array, result: Array) -> None:
    """Rows times four columns; a product of matrices takes twice as long for so few.

    Two rows at a time: the columns are read once for both, and all sums stay in registers, of which many processors
    have sixteen.
    """
    last, kind = len(rows) - 1, columns.dtype.type
    for i in range(0, len(rows), 2):
        j = min(i + 1, last)  # where one is left, it is done twice
        a = b = c = d = e = f = g = h = kind(0)
        for x in range(rows.shape[1]):
            one, two, three, four = columns[0, x], columns[1, x], columns[2, x], columns[3, x]
            value = kind(rows[i, x])
            a, b, c, d = a + value * one, b + value * two, c + value * three, d + value * four
            value = kind(rows[j, x])
            e, f, g, h = e + value * one, f + value * two, g + value * three, h + value * four
        result[i, 0], result[i, 1], result[i, 2], result[i, 3] = a, b, c, d
        result[j, 0], result[j, 1], result[j, 2], result[j, 3] = e, f, g, h


@numba.njit(nogil=True, fastmath=FAST, error_model="numpy")
@no_type_check
def _square(rows: Array, row: int) -> float:
    total = _ZERO
    for at in range(rows.shape[1]):
        total += rows[row, at] * rows[row, at]
    return total


@numba.njit(nogil=True, fastmath=FAST, error_model="numpy")
@no_type_check
def _add_rows(heads: Array, gradients: Array, total: Array) -> None:
    """Σ (x_t · R)ᵀ g_t in four rows and Σ g_t in a fifth, four events at a time."""
    count = len(heads)
    for c in range(5):
        for j in range(total.shape[1]):
            total[c, j] = _ZERO
    for at in range(0, count, 4):
        # Where fewer than four are left, the last one stands for the others, times zero.
        second, third, fourth = min(at + 1, count - 1), min(at + 2, count - 1), min(at + 3, count - 1)
        two, three, four = np.float32(at + 1 < count), np.float32(at + 2 < count), np.float32(at + 3 < count)
        a, b, c, d = heads[at, 0], heads[at, 1], heads[at, 2], heads[at, 3]
        e, f, g, h = heads[second, 0], heads[second, 1], heads[second, 2], heads[second, 3]
        p, q, r, s = heads[third, 0], heads[third, 1], heads[third, 2], heads[third, 3]
        t, u, v, w = heads[fourth, 0], heads[fourth, 1], heads[fourth, 2], heads[fourth, 3]
        for j in range(total.shape[1]):
            i, k = gradients[at, j], gradients[second, j] * two
            m, n = gradients[third, j] * three, gradients[fourth, j] * four
            total[0, j] += (a * i + e * k) + (p * m + t * n)
            total[1, j] += (b * i + f * k) + (q * m + u * n)
            total[2, j] += (c * i + g * k) + (r * m + v * n)
            total[3, j] += (d * i + h * k) + (s * m + w * n)
            total[4, j] += (i + k) + (m + n)


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _move(source: int, target: int, count: int) -> None:
    """Copy numbers that nobody will look at soon."""
    numbers, place = carray(floats(source), count), carray(floats(target), count)
    at = 0
    while at < count and (target + 4 * at) % (4 * LINE):
        place[at] = numbers[at]
        at += 1
    while at + LINE <= count:
        put_line(target + 4 * at, source + 4 * at)
        at += LINE
    while at < count:
        place[at] = numbers[at]
        at += 1


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _keep(source: int, target: int, count: int, sums: int) -> None:
    """Copy numbers to the arena, and sum their blocks for the checksums, where there is a table."""
    start = stop = 4 * count
    if sums:
        start, stop = copy_blocks(source, target, 4 * count, sums)
    _move(source, target, start // 4)
    _move(source + stop, target + stop, count - stop // 4)


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _after(job: Array) -> int:
    """Where the sizes of the parts are: behind their sums and the heads, on a whole fp64 number."""
    return job[11] + (4 * (5 * job[3] * job[4] + 4 * job[1]) + 7) // 8 * 8


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _take(job: Array, part: int) -> None:
    """Copy some rows of keys and gradients, and sketch them into a sum of their own."""
    rows, width, out, parts = job[1], job[2], job[3], job[4]
    start, stop = rows * part // parts, rows * (part + 1) // parts
    count = stop - start
    keys = carray(floats(job[5] + 4 * start * width), (count, width))
    gradients = carray(floats(job[6] + 4 * start * out), (count, out))
    heads = carray(floats(job[11] + 4 * (5 * out * parts + 4 * start)), (count, 4))
    sums = carray(doubles(_after(job)), 2 * parts)
    if job[8]:
        _keep(job[5] + 4 * start * width, job[8] + 4 * start * width, count * width, job[12])
    if job[14]:
        hash_rows(job[5] + 4 * start * width, 4 * width, count, job[14] + 16 * start)
    _multiply(keys, carray(floats(job[7]), (4, width)), heads)
    if job[9]:
        _keep(job[6] + 4 * start * out, job[9] + 4 * start * out, count * out, job[12])
    _add_rows(heads, gradients, carray(floats(job[11] + 20 * out * part), (5, out)))
    of_weight = of_bias = _NONE
    for row in range(count):
        size = np.float64(_square(gradients, row))
        of_bias += size
        of_weight += size * _square(keys, row)
    sums[2 * part], sums[2 * part + 1] = of_weight, of_bias


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _took(job: Array) -> bool:
    """All parts are there: their sums, and the sizes of their terms; whether the sums are finite."""
    out, parts = job[3], job[4]
    total, each = carray(floats(job[10]), 5 * out), carray(floats(job[11]), (parts, 5 * out))
    for at in range(5 * out):
        total[at] = each[0, at]
    for part in range(1, parts):
        for at in range(5 * out):
            total[at] += each[part, at]
    spoiled = _ZERO
    for at in range(5 * out):
        spoiled += total[at] * _ZERO  # NaN where it is not finite
    each_sum, sums = carray(doubles(_after(job)), 2 * parts), carray(doubles(job[13]), 2)
    sums[0] = sums[1] = _NONE
    for part in range(parts):
        sums[0] += each_sum[2 * part]
        sums[1] += each_sum[2 * part + 1]
    return spoiled == _ZERO


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _compare(job: Array, step: int) -> None:
    """‖G‖², G·S and ‖S‖² of the sketch of a gradient and of some rows of what the events put into it, in fp64."""
    rows, columns, first = job[1], job[2], job[8]
    result = carray(floats(job[10] + step * job[7]), (rows, columns))
    events = carray(floats(job[5] + step * job[6]), (5, rows))
    gradient = common = own = _NONE
    for row in range(rows):
        for c in range(columns):
            g, s = np.float64(result[row, c]), np.float64(events[first + c, row])
            gradient += g * g
            common += g * s
            own += s * s
    sums = carray(doubles(job[13] + step * job[14]), 3)
    sums[0], sums[1], sums[2] = gradient, common, own


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _project(job: Array, part: int) -> None:
    """Multiply some rows of a matrix with the probe's columns."""
    rows, width, parts = job[1], job[2], job[4]
    start, stop = rows * part // parts, rows * (part + 1) // parts
    count = stop - start
    matrix = carray(floats(job[5] + 4 * start * width), (count, width))
    if job[0] == PROJECT:
        result = carray(floats(job[10] + 16 * start), (count, 4))
        _multiply(matrix, carray(floats(job[7]), (4, width)), result)
    else:
        wide = carray(doubles(job[10] + 32 * start), (count, 4))
        _multiply(matrix, carray(doubles(job[7]), (4, width)), wide)


@numba.njit("void(i8, i8, f8[:, ::1], f8[:, ::1], f8[::1])", cache=True, fastmath=FAST, error_model="numpy")
@no_type_check
def follow(rows: int, stride: int, factors: Array, moved: Array, sizes: Array) -> None:
    """Add up fp32 rows, so many bytes apart, times each of two factors, in fp64; the square of the size of each."""
    for row in range(len(sizes)):
        numbers = carray(floats(rows + stride * row), moved.shape[1])
        a, b, size = factors[0, row], factors[1, row], _NONE
        for at in range(len(numbers)):
            value = np.float64(numbers[at])
            moved[0, at] += a * value
            moved[1, at] += b * value
            size += value * value
        sizes[row] = size


@numba.cfunc("u8(i8, i8, i8)", cache=True, nopython=True)
@no_type_check
def _copy_ids(source, target, count) -> int:
    """Copy whole numbers; the largest of them, where a negative one is larger than all others."""
    numbers, place = carray(longs(source), count), carray(longs(target), count)
    high = np.uint64(0)
    for at in range(count):
        place[at] = numbers[at]
        high = max(high, np.uint64(numbers[at]))
    return high


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _do(table: Array, at: int, part: int) -> None:
    """Do one part of the job that begins there."""
    job = table[at : at + FIELDS]
    if job[0] == TAKE:
        _take(job, part)
        if take_next(table, at + FIELDS - 1) == job[4] - 1 and not _took(job):  # that was the last part
            table[SPOILED] = 1
    elif job[0] == COPY:
        _move(job[5], job[10], job[1])
    elif job[0] == COMPARE:
        _compare(job, part)
    else:
        _project(job, part)


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _share_of(job: Array, number: int, share: int, shares: int) -> tuple[int, int]:
    """Which parts of a job are in a share: from the first to before the last."""
    parts = job[4]
    if parts == 1:
        return 0, number % shares == share
    return parts * share // shares, parts * (share + 1) // shares


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _do_all(table: Array) -> None:
    """Take the next part of the jobs until none is left: of this thread's own share first, and there the last first.

    Torch's threads share the rows of every tensor in the same way, from the first to the last: so each finds what it
    used last itself, in its own caches.
    """
    shares = table[SHARES]
    own = call(table[THREADS]) if shares > 1 else 0
    for further in range(shares):
        share = (own + further) % shares
        number, before = 0, 0
        turn = take_next(table, SHARE_LINE * (1 + share))
        while number < table[JOBS]:
            at = HEAD + FIELDS * number
            first, stop = _share_of(table[at : at + FIELDS], number, share, shares)
            if turn < before + stop - first:
                _do(table, at, stop - 1 - (turn - before))
                turn = take_next(table, SHARE_LINE * (1 + share))
            else:
                before += stop - first
                number += 1


@no_type_check
def _entries(version: int) -> tuple[Any, Any]:
    """What torch's threads call, and what Python calls; numba looks at `version`, too, before it takes cached code."""

    @numba.cfunc("void(CPointer(i8))", cache=True, nopython=True)
    @no_type_check
    def work(start) -> None:
        table = carray(start, HEAD + FIELDS * carray(start, HEAD)[JOBS])
        table[VERSION] = version
        _do_all(table)

    @numba.cfunc("b1(i8, CPointer(i8), CPointer(i8), i8)", cache=True, nopython=True)
    @no_type_check
    def run(work, start, values, threads) -> bool:
        """Do a table's jobs with these numbers, by torch's own threads; whether every sketch came out finite."""
        head = carray(start, HEAD)
        jobs, changing = HEAD + FIELDS * head[JOBS], head[CHANGING]
        table, changed = carray(start, jobs + changing), carray(values, changing)
        for at in range(changing):
            table[table[jobs + at]] = changed[at]
        table[VERSION], table[SPOILED], table[SHARES] = version, 0, min(threads, SHARED)
        for share in range(table[SHARES]):
            table[SHARE_LINE * (1 + share)] = 0
        for number in range(table[JOBS]):
            table[HEAD + FIELDS * number + FIELDS - 1] = 0
        if threads > 1:
            in_threads(table[THREADS + 1], work, table.ctypes.data, threads)
        else:
            _do_all(table)
        return table[SPOILED] == 0

    return work, run


# Numba itself looks only at this file, and the code in its cache has the layout of a table and more compiled in.
_sources = [Path(str(module.__file__)).read_bytes() for module in (jobs, intrinsics, xxh3, blocksums)]
_work, _run = _entries(zlib.crc32(b"".join(_sources)))
copy_ids = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(_copy_ids.address)
"""Takes the addresses of ids and of a copy, and how many they are."""
_call_run = ctypes.PYFUNCTYPE(ctypes.c_bool, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
run = partial(_call_run(_run.address), _work.address)
"""Takes the addresses of a table and of the numbers that change, and how many threads are to do the jobs."""
