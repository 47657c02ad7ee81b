"""Small arrays in memory of their own."""

import numpy as np

from dualform.memory.slab import LINE, SLAB, Slab


def test_arrays_are_apart_and_aligned() -> None:
    slab = Slab()
    arrays = [slab.zeros((n, 3), np.int64) for n in range(1, 40)] + [
        slab.empty((), np.float32),
        slab.empty((0,), np.uint8),
    ]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % LINE == 0
        array.fill(number)
    assert all((array == number).all() for number, array in enumerate(arrays))


def test_an_array_larger_than_a_slab_and_arrays_beyond_its_end() -> None:
    slab = Slab()
    first = slab.zeros((10,), np.uint8)
    large = slab.zeros((SLAB + 1,), np.uint8)
    first.fill(1)
    large.fill(2)
    rest = [slab.zeros((SLAB // 3,), np.uint8) for _ in range(5)]
    for array in rest:
        array.fill(3)
    assert (first == 1).all() and (large == 2).all()
