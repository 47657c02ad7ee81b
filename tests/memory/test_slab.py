"""Small arrays in memory of their own."""

import os

import numpy as np
import pytest

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_to_memory_of_its_own() -> None:
    slab = Slab()
    array = slab.zeros((100,), np.int64)
    child = os.fork()
    if child == 0:
        array.fill(9)
        slab.empty((100,), np.int64).fill(9)
        os._exit(0)
    os.waitpid(child, 0)
    assert not array.any() and not slab.empty((100,), np.int64).any()


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
