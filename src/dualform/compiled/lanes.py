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
GROUP = 16  # columns


@intrinsic
@no_type_check
def reaching(context, levels, asked, block, query, enough) -> Any:
    """Which rows of a block have a bound that is not below `enough`, by so many levels: a bit each, the first lowest.

    `levels` are (blocks, columns, lanes), `asked` are (queries, columns); only the last level's tail counts.
    """

    def generate(context, builder, signature, arguments) -> Any:
        _, (bounds,) = _sums(context, builder, signature, arguments, [arguments[3]])
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
        _, bounds = _sums(context, builder, signature, arguments, queries)
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


@no_type_check
def _listed(several, first) -> Any:
    """What bounds so many queries of a list at once, by the levels from this one on."""

    @intrinsic
    @no_type_check
    def listed_reaching(context, levels, asked, block, list, at, thresholds, extra, sums, froms, bits) -> Any:
        def generate(context, builder, signature, arguments) -> Any:
            queries_of, enough, kept, before, result = (
                _data(context, builder, signature, arguments, at) for at in (3, 5, 7, 8, 9)
            )
            places = [builder.add(arguments[4], ir.Constant(_LONG, at)) for at in range(several)]
            queries = [builder.load(builder.gep(queries_of, [place])) for place in places]
            # Where what is known by the levels before is, or where what is known by these is put.
            held = [builder.load(builder.gep(before, [place])) if first else place for place in places]
            held = [builder.gep(kept, [builder.mul(at, ir.Constant(_LONG, LANES))]) for at in held]
            held = [builder.bitcast(at, _VECTOR.as_pointer()) for at in held]
            known = [builder.load(at, align=4) for at in held] if first else None
            sums, bounds = _sums(context, builder, signature, arguments, queries, first, known)
            for place, query, to, sum_, bound in zip(places, queries, held, sums, bounds, strict=True):
                if not first:
                    builder.store(sum_, to, align=4)
                least = builder.fsub(builder.load(builder.gep(enough, [query])), arguments[6])
                reached = builder.fcmp_ordered(">=", bound, _everywhere(builder, least))
                builder.store(builder.bitcast(reached, _SHORT), builder.gep(result, [place]))
            return context.get_dummy_value()

        _check(levels, asked)
        return types.void(
            levels, asked, types.int64, list, types.int64, thresholds, types.float32, sums, froms, bits
        ), generate

    return listed_reaching


# Queries of a list and a place in it on, by the first levels, of which the sums without a tail are kept; and by the
# last one, on top of what was kept where `froms` says.
partly_reaching, several_partly_reaching = _listed(1, 0), _listed(SEVERAL, 0)
further_reaching, several_further_reaching = _listed(1, 2), _listed(SEVERAL, 2)


@no_type_check
def _into(several) -> Any:
    """What puts the bounds of so many queries into an array."""

    @intrinsic
    @no_type_check
    def bounds_into(context, levels, asked, block, query, result, at, apart) -> Any:
        def generate(context, builder, signature, arguments) -> Any:
            queries = [builder.add(arguments[3], ir.Constant(_LONG, at)) for at in range(several)]
            to = builder.gep(_data(context, builder, signature, arguments, 4), [arguments[5]])
            for bound in _sums(context, builder, signature, arguments, queries)[1]:
                builder.store(bound, builder.bitcast(to, _VECTOR.as_pointer()), align=4)
                to = builder.gep(to, [arguments[6]])
            return context.get_dummy_value()

        _check(levels, asked)
        return types.void(levels, asked, types.int64, types.int64, result, types.int64, types.int64), generate

    return bounds_into


# The bounds of all rows of a block for this query (and the next ones), from a place on and so far `apart`.
bounds_into, several_bounds_into = _into(1), _into(SEVERAL)


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
def group_reaching(context, values, row, column, scale, cuts, at, absolute) -> Any:
    """Which numbers of a row, a GROUP of columns from this one on, reach their cuts in fp32 once they are scaled.

    The cuts are those from a place on. A bit each, the first lowest.
    """

    def generate(context, builder, signature, arguments) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.add(builder.mul(arguments[1], builder.extract_value(array.shape, 1)), arguments[2])
        starts = (
            builder.gep(array.data, [place]),
            builder.gep(_data(context, builder, signature, arguments, 4), [arguments[5]]),
        )
        numbers, least = (
            builder.load(builder.bitcast(start, ir.VectorType(start.type.pointee, GROUP).as_pointer()), align=4)
            for start in starts
        )
        kind = ir.VectorType(_FLOAT, GROUP)
        if numbers.type.element == _SHORT:
            numbers = builder.sitofp(numbers, kind)
        elif numbers.type.element != _FLOAT:
            numbers = builder.fptrunc(numbers, kind)
        scaled = builder.fmul(numbers, _everywhere(builder, arguments[3], GROUP))
        reached, opposite = (
            builder.bitcast(builder.fcmp_ordered(">=", one, least), ir.IntType(GROUP))
            for one in (scaled, builder.fneg(scaled))
        )
        return builder.zext(builder.select(arguments[6], builder.or_(reached, opposite), reached), _SHORT)

    known = types.int32, types.float32, types.float64
    if values.dtype not in known or (values.ndim, values.layout) != (2, "C"):
        raise TypingError(f"{values} has no rows of numbers, one after the other")
    if (cuts.dtype, cuts.ndim, cuts.layout) != (types.float32, 1, "C"):
        raise TypingError(f"{cuts} are no numbers in fp32, one after the other")
    known = types.int64, types.int64, types.float32, cuts, types.int64, types.boolean
    return types.uint32(values, *known), generate


@intrinsic
@no_type_check
def narrow_product(context, rows, row, queries, query, columns) -> Any:
    """The product of the first columns of a row and of a query in fp32, of which WIDE are summed side by side.

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
        total, done, width = None, ir.Constant(_LONG, 0), arguments[4]
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
    return types.float32(rows, types.int64, queries, types.int64, types.int64), generate


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
def _everywhere(builder, value, lanes=LANES) -> Any:
    """A vector of one number."""
    nothing = ir.Constant(ir.VectorType(_FLOAT, lanes), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_SHORT, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_SHORT, lanes), [0] * lanes))


@no_type_check
def _sums(context, builder, signature, arguments, queries, first=0, known=None) -> Any:
    """The sums over all columns but the last tail, and the bounds, which are the sums with it, for some queries.

    The levels are those from `first` on, and are added to what is known.
    """
    levels, asked, block = arguments[:3]
    count, totals = len(signature.args[0]), known or [None] * len(queries)
    for number in range(count):
        start, stop = SPANS[first + number]
        rows, where = _part(context, builder, signature.args[0], levels, number, block, (stop - start + 1) * LANES)
        parts = [
            _part(context, builder, signature.args[1], asked, number, query, stop - start + 1) for query in queries
        ]
        for column in range(stop - start + (number == count - 1)):
            before = totals
            place = builder.gep(rows, [builder.add(where, ir.Constant(_LONG, column * LANES))])
            row = builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
            totals = []
            for total, (columns, from_) in zip(before, parts, strict=True):
                value = builder.load(builder.gep(columns, [builder.add(from_, ir.Constant(_LONG, column))]))
                term = builder.fmul(row, _everywhere(builder, value), flags=_FUSED)
                totals.append(term if total is None else builder.fadd(total, term, flags=_FUSED))
    return before, totals


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
