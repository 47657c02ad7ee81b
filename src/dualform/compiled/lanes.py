"""Blocks of rows as vectors: all rows of a block are multiplied with a query at once.

A compiler that is left to find these vectors by itself finds them in some loops and not in others, which then take
ten times as long. Vectors of this kind are cut to what the processor has.
"""

from typing import Any, no_type_check

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from dualform.fast import LANES, SPANS

_FLOAT, _SHORT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FUSED = ("contract", "reassoc")


@intrinsic
@no_type_check
def reaching(context, levels, asked, block, query, enough) -> Any:
    """Which rows of a block have a bound that is not below `enough`, by so many levels: a bit each, the first lowest.

    `levels` are (blocks, columns, lanes), `asked` are (queries, columns); only the last level's tail counts.
    """

    def generate(context, builder, signature, arguments) -> Any:
        bounds = _bounds(context, builder, signature, arguments)
        reached = builder.fcmp_ordered(">=", bounds, _everywhere(builder, arguments[4]))
        return builder.bitcast(reached, _SHORT)

    _check(levels, asked)
    return types.uint32(levels, asked, types.int64, types.int64, types.float32), generate


@intrinsic
@no_type_check
def bounds_into(context, levels, asked, block, query, result, at) -> Any:
    """Put the bounds of all rows of a block into an array of fp32 numbers, from a place on."""

    def generate(context, builder, signature, arguments) -> Any:
        to = context.make_array(signature.args[4])(context, builder, arguments[4]).data
        to = builder.bitcast(builder.gep(to, [arguments[5]]), _VECTOR.as_pointer())
        builder.store(_bounds(context, builder, signature, arguments), to, align=4)
        return context.get_dummy_value()

    _check(levels, asked)
    return types.void(levels, asked, types.int64, types.int64, result, types.int64), generate


@intrinsic
@no_type_check
def lowest_bit(context, bits) -> Any:
    """The number of the lowest bit that is set."""

    def generate(context, builder, signature, arguments) -> Any:
        return builder.zext(builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0)), _LONG)

    return types.int64(types.uint32), generate


@no_type_check
def _check(levels, asked) -> None:
    """TypingError for arrays of another kind: they would be read as if they were of this one."""
    for kinds, dimensions in ((levels, 3), (asked, 2)):
        for kind in kinds.types:
            if (kind.dtype, kind.ndim, kind.layout) != (types.float32, dimensions, "C"):
                raise TypingError(f"{kind} is no block of rows in fp32, one after the other")


@no_type_check
def _everywhere(builder, value) -> Any:
    """A vector of one number."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_SHORT, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_SHORT, LANES), [0] * LANES))


@no_type_check
def _bounds(context, builder, signature, arguments) -> Any:
    """The sum over all columns."""
    levels, asked, block, query = arguments[:4]
    count, total = len(signature.args[0]), None
    for number in range(count):
        start, stop = SPANS[number]
        rows, where = _part(context, builder, signature.args[0], levels, number, block, (stop - start + 1) * LANES)
        columns, from_ = _part(context, builder, signature.args[1], asked, number, query, stop - start + 1)
        for column in range(stop - start + (number == count - 1)):
            place = builder.gep(rows, [builder.add(where, ir.Constant(_LONG, column * LANES))])
            row = builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
            value = builder.load(builder.gep(columns, [builder.add(from_, ir.Constant(_LONG, column))]))
            term = builder.fmul(row, _everywhere(builder, value), flags=_FUSED)
            total = term if total is None else builder.fadd(total, term, flags=_FUSED)
    return total


@no_type_check
def _part(context, builder, kinds, arrays, number, at, size) -> Any:
    """The numbers of one of some arrays, and where a part of it begins."""
    array = context.make_array(kinds.types[number])(context, builder, cgutils.unpack_tuple(builder, arrays)[number])
    return array.data, builder.mul(at, ir.Constant(_LONG, size))
