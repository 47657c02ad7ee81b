"""XXH3 by compiled loops: of rows at once, which needs no interpreter (the training has it), and of whole chunks.

Within a block of 1 KB the eight sums of XXH3 are plain sums over its stripes, whatever came before it. So those of a
chunk can be taken while a block is copied and lies in the cache (`copy_blocks`); what is left at the end is a look at
eight numbers for each (`checksum_chunks`).
"""

from typing import Any, no_type_check

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from dualform.memory import entering
from dualform.memory.blocksums import BLOCK
from dualform.memory.files import CHUNK

Array = np.ndarray[Any, Any]
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
START = (0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77,
         0x27D4EB2F165667C5, 0x9E3779B1)  # fmt: skip
STRIPE, SLIDE = 64, 8
BLOCKS = CHUNK // BLOCK
_LONG = ir.IntType(64)
_LANES = ir.VectorType(_LONG, 8)


def _words(at: int) -> list[int]:
    """Eight numbers of the secret."""
    return [int.from_bytes(SECRET[at + 8 * lane : at + 8 * lane + 8], "little") for lane in range(8)]


_secret = np.frombuffer(SECRET, dtype=np.uint8)
_starting = np.array(START, dtype=np.uint64)
_scrambling, _merging, _merging_high = (
    np.array(_words(at), dtype=np.uint64) for at in (len(SECRET) - STRIPE, 11, len(SECRET) - STRIPE - 11)
)


@no_type_check
def _summing(places, copied=False) -> Any:
    """An intrinsic that adds up the stripes of a block, each mixed with the secret from such a place on.

    `copied` also puts the block where it is told to, past the caches, which belong to the training.
    """

    @no_type_check
    def generate(context, builder, signature, arguments) -> Any:
        source, sums, *target = (builder.inttoptr(address, _LANES.as_pointer()) for address in arguments)
        total = ir.Constant(_LANES, [0] * 8)
        for stripe, at in enumerate(places):
            here = [ir.Constant(_LONG, stripe)]
            data = builder.load(builder.gep(source, here), align=1)
            for place in target:
                stored = builder.store(data, builder.gep(place, here), align=STRIPE)
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            total = builder.add(total, _mixed(builder, data, ir.Constant(_LANES, _words(at))))
        builder.store(total, sums, align=8)
        return context.get_dummy_value()

    @intrinsic
    @no_type_check
    def summed(context, source, sums) -> Any:
        return types.void(types.int64, types.int64), generate

    @intrinsic
    @no_type_check
    def summed_and_copied(context, source, sums, target) -> Any:
        return types.void(types.int64, types.int64, types.int64), generate

    return summed_and_copied if copied else summed


@no_type_check
def _mixed(builder, data, secret) -> Any:
    """What a stripe, mixed with a part of the secret, adds to the sums."""
    low, half = (ir.Constant(_LANES, [number] * 8) for number in (0xFFFFFFFF, 32))
    other = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    both = builder.xor(data, secret)
    product = builder.mul(builder.and_(both, low), builder.lshr(both, half))
    return builder.add(product, builder.shuffle_vector(data, data, other))


@intrinsic
@no_type_check
def _add_stripe(context, source, secret, target) -> Any:
    """Add a single stripe, mixed with what is at an address, to the sums."""

    def generate(context, builder, signature, arguments) -> Any:
        pointers = [builder.inttoptr(address, _LANES.as_pointer()) for address in arguments]
        data, key, total = (builder.load(pointer, align=1) for pointer in pointers)
        builder.store(builder.add(total, _mixed(builder, data, key)), pointers[2], align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_PLACES = [SLIDE * stripe for stripe in range(BLOCK // STRIPE)]
_sum_block = _summing(_PLACES)
_copy_block = _summing(_PLACES, copied=True)
_sum_last = _summing([*_PLACES[:-1], len(SECRET) - STRIPE - 7])  # of a chunk: its last stripe is mixed otherwise


@intrinsic
@no_type_check
def _folded(context, one, two) -> Any:
    """The two halves of a product of 128 bits, one upon the other."""

    def generate(context, builder, signature, arguments) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _LONG)
        return builder.xor(builder.trunc(product, _LONG), high)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
@no_type_check
def _at(context, address) -> Any:
    def generate(context, builder, signature, arguments) -> Any:
        return builder.inttoptr(arguments[0], _LONG.as_pointer())

    return types.CPointer(types.uint64)(types.int64), generate


@intrinsic
@no_type_check
def _bytes(context, address) -> Any:
    def generate(context, builder, signature, arguments) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.int64), generate


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def copy_blocks(source: int, target: int, size: int, table: int) -> tuple[int, int]:
    """Copy and sum the whole blocks of what is to be copied to an arena; where they begin and end, in bytes.

    The table is that of BlockSums.
    """
    numbers = numba.carray(_at(table), 3)
    start, sums, known = np.int64(numbers[0]), np.int64(numbers[1]), np.int64(numbers[2])
    first, stop = (target - start + BLOCK - 1) // BLOCK, (target - start + size) // BLOCK
    for block in range(first, stop):
        place = start + BLOCK * block
        _copy_block(source + (place - target), sums + STRIPE * block, place)
        numba.carray(_bytes(known + block), 1)[0] = np.uint8(1)
    if first >= stop:
        return size, size
    return start + BLOCK * first - target, start + BLOCK * stop - target


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _scramble(total: Array) -> None:
    """After every block but the last."""
    for lane in range(8):
        value = total[lane]
        total[lane] = (value ^ (value >> np.uint64(47)) ^ _scrambling[lane]) * np.uint64(START[7])


@numba.njit(nogil=True, error_model="numpy")
@no_type_check
def _merged(total: Array, start: int, words: Array) -> int:
    """The checksum that the eight sums make."""
    merged = start
    for at in range(0, 8, 2):
        merged += _folded(total[at] ^ words[at], total[at + 1] ^ words[at + 1])
    merged ^= merged >> np.uint64(37)
    merged *= np.uint64(0x165667919E3779F9)
    return merged ^ (merged >> np.uint64(32))


@numba.njit("void(i8[:, ::1], u8[::1])", cache=True, nogil=True, error_model="numpy")
@no_type_check
def checksum_chunks(pieces: Array, result: Array) -> None:
    """The checksums of the whole chunks of pieces that follow each other.

    A piece is its address and length, and the address of the table of BlockSums of where it lies, or 0.
    """
    total, fresh, gathered = _starting.copy(), np.empty(8, dtype=np.uint64), np.empty(BLOCK, dtype=np.uint8)
    filled = block = chunk = 0
    for piece in range(len(pieces)):
        at, length, table = 0, pieces[piece, 1], pieces[piece, 2]
        numbers = numba.carray(_at(table if table else pieces.ctypes.data), 3)
        start, sums, known = np.int64(numbers[0]), np.int64(numbers[1]), np.int64(numbers[2])
        while at < length:
            here = pieces[piece, 0] + at
            if filled or length - at < BLOCK:  # a block of several pieces
                part = min(BLOCK - filled, length - at)
                gathered[filled : filled + part] = numba.carray(_bytes(here), part)
                filled, at = filled + part, at + part
                if filled < BLOCK:
                    break
                here, filled, offset = gathered.ctypes.data, 0, 1
            else:
                at += BLOCK
                offset = here - start if table else 1
            summed = fresh.ctypes.data
            if block == BLOCKS - 1:
                _sum_last(here, summed)
            elif offset % BLOCK == 0 and numba.carray(_bytes(known + offset // BLOCK), 1)[0]:
                summed = sums + STRIPE * (offset // BLOCK)
            else:
                _sum_block(here, summed)
            each = numba.carray(_at(summed), 8)
            for lane in range(8):
                total[lane] += each[lane]
            block += 1
            if block < BLOCKS:
                _scramble(total)
            else:
                result[chunk] = _merged(total, np.uint64(CHUNK) * np.uint64(START[1]), _merging)
                total[:] = _starting
                block, chunk = 0, chunk + 1


_ENTER = "Tuple((i8, i8, i8))(i8[::1], u8[:, ::1], i8[::1], u8[:, ::1], i8, i8[::1])"
enter_rows = numba.njit(_ENTER, cache=True, nogil=True)(entering.enter_rows)


@numba.njit("void(i8, i8, i8, i8)", cache=True, nogil=True, error_model="numpy")
@no_type_check
def hash_rows(rows: int, width: int, count: int, to: int) -> None:
    """The 128-bit hash of every row, its high half first; they begin at an address, and are longer than 240 bytes."""
    total, fresh, secret = np.empty(8, dtype=np.uint64), np.empty(8, dtype=np.uint64), _secret.ctypes.data
    size = np.uint64(width)
    blocks = (width - 1) // BLOCK
    result = numba.carray(_at(to), (count, 2))
    for row in range(count):
        start = rows + width * row
        total[:] = _starting
        for block in range(blocks):
            _sum_block(start + BLOCK * block, fresh.ctypes.data)
            for lane in range(8):
                total[lane] += fresh[lane]
            _scramble(total)
        for stripe in range((width - 1) % BLOCK // STRIPE):
            _add_stripe(start + BLOCK * blocks + STRIPE * stripe, secret + SLIDE * stripe, total.ctypes.data)
        _add_stripe(start + width - STRIPE, secret + len(SECRET) - STRIPE - 7, total.ctypes.data)
        result[row, 0] = _merged(total, ~(size * np.uint64(START[2])), _merging_high)
        result[row, 1] = _merged(total, size * np.uint64(START[1]), _merging)
