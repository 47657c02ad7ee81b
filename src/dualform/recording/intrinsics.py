"""What the recorder's compiled loops ask of the processor and of torch's threads, for which numba has no words."""

from typing import Any, no_type_check

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

LINE = 16  # fp32 numbers of a line of the caches
_LONG = ir.IntType(64)


@no_type_check
def _pointer_to(kind, element) -> Any:
    """An intrinsic that takes an address for that of numbers of one kind."""

    @intrinsic
    @no_type_check
    def pointer(context, address) -> Any:
        def generate(context, builder, signature, arguments) -> Any:
            return builder.inttoptr(arguments[0], element.as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return pointer


longs = _pointer_to(types.int64, _LONG)
floats = _pointer_to(types.float32, ir.FloatType())
doubles = _pointer_to(types.float64, ir.DoubleType())


@intrinsic
@no_type_check
def take_next(context, table, at) -> Any:
    """Add one to an entry of the table, whatever other threads do; what it was before."""

    def generate(context, builder, signature, arguments) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), ir.Constant(_LONG, 1), "acq_rel")

    return types.int64(table, types.int64), generate


@intrinsic
@no_type_check
def call(context, address) -> Any:
    """Call what is at an address, and takes nothing; what it says is a small whole number, if anything."""

    def generate(context, builder, signature, arguments) -> Any:
        kind = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind), []), _LONG)

    return types.int64(types.int64), generate


@intrinsic
@no_type_check
def in_threads(context, address, function, argument, threads) -> Any:
    """Have GNU's OpenMP run a function, of an argument, in so many threads, of which this is one."""

    def generate(context, builder, signature, arguments) -> Any:
        short = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_LONG, _LONG, short, short]).as_pointer()
        given = [*arguments[1:3], builder.trunc(arguments[3], short), ir.Constant(short, 0)]
        builder.call(builder.inttoptr(arguments[0], kind), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
@no_type_check
def put_line(context, target, source) -> Any:
    """Copy a line of sixteen numbers past the caches, which belong to the training; the target is aligned to it."""

    def generate(context, builder, signature, arguments) -> Any:
        line = ir.VectorType(ir.FloatType(), LINE).as_pointer()
        to, from_ = (builder.inttoptr(address, line) for address in arguments)
        stored = builder.store(builder.load(from_, align=4), to, align=4 * LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
