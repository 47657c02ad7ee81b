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
SEVERAL = 2  # queries
WIDE = 64  # numbers


@intrinsic
@no_type_check
def reaching(context, levels, asked, block, query, enough) -> Any:
    """Which rows of a block have a bound that is not below `enough`, by so many levels: a bit each, the first lowest.

    `levels` are (blocks, columns, lanes), `asked` are (queries, columns); only the last level's tail counts.
    """

    def generate(context, builder, signature, arguments) -> Any:
        (bounds,) = _bounds(context, builder, signature, arguments, [arguments[3]])
        reached = builder.fcmp_ordered(">=", bounds, _everywhere(builder, arguments[4]))
        return builder.bitcast(reached, _SHORT)

    _check(levels, asked)
    return types.uint32(levels, asked, types.int64, types.int64, types.float32), generate


@intrinsic
@no_type_check
def several_reaching(context, levels, asked, block, query, thresholds, extra, bits, to) -> Any:
    """The same for SEVERAL queries, this one and the next, into `bits` from a place on.

    The columns of a block are read once for all of them. Enough is a query's threshold less `extra`.
    """

    def generate(context, builder, signature, arguments) -> Any:
        enough, result = (_data(context, builder, signature, arguments, at) for at in (4, 6))
        queries = [builder.add(arguments[3], ir.Constant(_LONG, at)) for at in range(SEVERAL)]
        bounds = _bounds(context, builder, signature, arguments, queries)
        for at, (query, bound) in enumerate(zip(queries, bounds, strict=True)):
            least = builder.fsub(builder.load(builder.gep(enough, [query])), arguments[5])
            reached = builder.fcmp_ordered(">=", bound, _everywhere(builder, least))
            builder.store(
                builder.bitcast(reached, _SHORT),
                builder.gep(result, [builder.add(arguments[7], ir.Constant(_LONG, at))]),
            )
        return context.get_dummy_value()

    _check(levels, asked)
    return types.void(levels, asked, types.int64, types.int64, thresholds, types.float32, bits, types.int64), generate


@intrinsic
@no_type_check
def bounds_into(context, levels, asked, block, query, result, at) -> Any:
    """Put the bounds of all rows of a block into an array of fp32 numbers, from a place on."""

    def generate(context, builder, signature, arguments) -> Any:
        (bounds,) = _bounds(context, builder, signature, arguments, [arguments[3]])
        to = builder.gep(_data(context, builder, signature, arguments, 4), [arguments[5]])
        builder.store(bounds, builder.bitcast(to, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    _check(levels, asked)
    return types.void(levels, asked, types.int64, types.int64, result, types.int64), generate


@intrinsic
@no_type_check
def not_below(context, values, at, enough) -> Any:
    """Which numbers of a block of an array, from a place on, are not below `enough`: a bit each, the first lowest."""

    def generate(context, builder, signature, arguments) -> Any:
        start = builder.gep(_data(context, builder, signature, arguments, 0), [arguments[1]])
        block = builder.load(builder.bitcast(start, _VECTOR.as_pointer()), align=4)
        reached = builder.fcmp_ordered(">=", block, _everywhere(builder, arguments[2]))
        return builder.bitcast(reached, _SHORT)

    return types.uint32(values, types.int64, types.float32), generate


@intrinsic
@no_type_check
def narrow_product(context, rows, row, queries, query) -> Any:
    """The product of a row with a query in fp32, of which WIDE numbers are summed side by side.

    So it errs by no more than error_of(width) of the product of the norms.
    """

    def generate(context, builder, signature, arguments) -> Any:
        width = context.make_array(signature.args[0])(context, builder, arguments[0]).shape
        width = builder.extract_value(width, 1)
        starts = []
        for at in (0, 2):
            data = _data(context, builder, signature, arguments, at)
            starts.append(builder.gep(data, [builder.mul(arguments[at + 1], width)]))
        # As many as possible side by side, then fewer, then one after the other.
        total, done = None, ir.Constant(_LONG, 0)
        for lanes in (WIDE, WIDE // 4, 1):
            kind = ir.VectorType(_FLOAT, lanes) if lanes > 1 else _FLOAT
            part = cgutils.alloca_once_value(builder, ir.Constant(kind, None))
            many = builder.udiv(builder.sub(width, done), ir.Constant(_LONG, lanes))
            with cgutils.for_range(builder, many) as loop:
                place = builder.add(done, builder.mul(loop.index, ir.Constant(_LONG, lanes)))
                one, other = (
                    builder.load(builder.bitcast(builder.gep(start, [place]), kind.as_pointer()), align=4)
                    for start in starts
                )
                term = builder.fmul(one, other, flags=_FUSED)
                builder.store(builder.fadd(builder.load(part), term, flags=_FUSED), part)
            done = builder.add(done, builder.mul(many, ir.Constant(_LONG, lanes)))
            summed = _summed(builder, builder.load(part)) if lanes > 1 else builder.load(part)
            total = summed if total is None else builder.fadd(total, summed)
        return total

    for kind in (rows, queries):
        if (kind.dtype, kind.ndim, kind.layout) != (types.float32, 2, "C"):
            raise TypingError(f"{kind} has no rows in fp32, one after the other")
    return types.float32(rows, types.int64, queries, types.int64), generate


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
def _bounds(context, builder, signature, arguments, queries) -> Any:
    """The sum over all columns, for each of some queries."""
    levels, asked, block = arguments[:3]
    count, totals = len(signature.args[0]), [None] * len(queries)
    for number in range(count):
        start, stop = SPANS[number]
        rows, where = _part(context, builder, signature.args[0], levels, number, block, (stop - start + 1) * LANES)
        parts = [
            _part(context, builder, signature.args[1], asked, number, query, stop - start + 1) for query in queries
        ]
        for column in range(stop - start + (number == count - 1)):
            place = builder.gep(rows, [builder.add(where, ir.Constant(_LONG, column * LANES))])
            row = builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
            for at, (columns, from_) in enumerate(parts):
                value = builder.load(builder.gep(columns, [builder.add(from_, ir.Constant(_LONG, column))]))
                term = builder.fmul(row, _everywhere(builder, value), flags=_FUSED)
                totals[at] = term if totals[at] is None else builder.fadd(totals[at], term, flags=_FUSED)
    return totals


@no_type_check
def _summed(builder, vector) -> Any:
    """The sum of a vector's numbers: one half is added to the other as long as there are halves."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        halves = (ir.Constant(ir.VectorType(_SHORT, lanes), list(range(at, at + lanes))) for at in (0, lanes))
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, ir.Constant(_SHORT, 0))


@no_type_check
def _part(context, builder, kinds, arrays, number, at, size) -> Any:
    """The numbers of one of some arrays, and where a part of it begins."""
    array = context.make_array(kinds.types[number])(context, builder, cgutils.unpack_tuple(builder, arrays)[number])
    return array.data, builder.mul(at, ir.Constant(_LONG, size))


@no_type_check
def _data(context, builder, signature, arguments, at) -> Any:
    """The numbers of an array."""
    return context.make_array(signature.args[at])(context, builder, arguments[at]).data
