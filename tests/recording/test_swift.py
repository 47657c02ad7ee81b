"""The recorder's compiled loops: sketches like torch's, from the same step on in every recording of a training."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xxhash
from torch import nn

import dualform
from dualform.errors import BadIds
from dualform.fast import load
from dualform.memory.arena import Arena, Shape, held
from dualform.memory.ledger import SHORTEST
from dualform.memory.slab import Slab, array_in
from dualform.recording import jobs, swift
from dualform.recording.ids import read_ids
from dualform.recording.jobs import FIELDS, HEAD, RESULT, SHARES, projecting
from dualform.recording.routine import Taking
from dualform.recording.targets import find_targets
from faults import compiled
from small import network, run

pytest.importorskip("numba")


@pytest.fixture
def compiled_loops() -> swift.Swift:
    loops = swift.Swift()
    loops.numbers = swift.PAYS + 1
    loops.reached(1)
    return loops


@pytest.mark.parametrize("rows, width", [(1, 1), (1, 30), (2, 7), (5, 17), (64, 784), (801, 3), (3, 65536)])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_a_projection_is_the_product(rows: int, width: int, dtype: torch.dtype, error: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(rows, width, generator=generator)
    columns = torch.randn(4, width, generator=generator, dtype=dtype)
    loops = swift.Swift()
    loops.numbers = swift.PAYS + 1
    assert loops.project(matrix, columns) is None, "before it pays, torch does it"
    loops.reached(1)
    result = loops.project(matrix, columns)
    assert result is not None and result.dtype == dtype
    sizes = matrix.double().abs() @ columns.double().abs().T
    assert bool(((result - matrix.double() @ columns.double().T).abs() <= error * sizes).all())
    matrix[-1, -1] = torch.inf
    spoiled = loops.project(matrix, columns)
    assert spoiled is not None and not spoiled[-1].isfinite().any() and spoiled[:-1].isfinite().all()
    assert loops.project(matrix.double(), columns) is None
    assert loops.project(torch.ones(3, 2 * width)[:, ::2], columns) is None, "not as they lie"


@pytest.mark.parametrize(
    "ids",
    [
        torch.arange(7),
        torch._neg_view(-torch.arange(7)),
        torch.tensor([0, 19, 3, 19]),
        torch.tensor([[1, 2], [3, 4]]),
        torch.arange(10)[::2],
        torch.arange(6, dtype=torch.int32),
        torch.tensor(4),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([3, 20]),
        torch.tensor([2, -1, 5]),
        torch.tensor([-(2**63)]),
        torch.tensor([2**63 - 1]),
        torch.ones(3),
        [1, 2, 3],
        "words",
    ],
    ids=str,
)
@pytest.mark.parametrize("examples", [None, 20])
def test_ids_are_read_as_without_the_loops(ids: object, examples: int | None) -> None:
    loops = load("dualform.recording.loops")
    slab = Slab()

    def read(how: ModuleType | None) -> list[object] | str:
        try:
            piece, shape = read_ids(ids, examples, slab, how)
        except BadIds as error:
            return str(error)
        return array_in(piece, tuple(shape), np.dtype(np.int64)).tolist()

    before = slab.zeros((3,), np.int64)
    found, plain = read(loops), read(None)
    assert found == plain
    if isinstance(plain, list):
        assert plain == (ids.tolist() if isinstance(ids, torch.Tensor) else np.asarray(ids).tolist())
    assert not before.any() and not slab.zeros((3,), np.int64).any()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows, width, outputs", [(1, 1, 1), (3, 7, 2), (5, 784, 10), (128, 784, 800), (301, 33, 65)])
def test_what_torchs_threads_take_is_the_plain_product(
    rows: int, width: int, outputs: int, threads: None, compiled_loops: swift.Swift
) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = nn.Linear(width, outputs)
    (use,) = find_targets(layer, None, seed=0).uses
    keys = torch.randn(rows, width, generator=generator)
    gradients = torch.randn(rows, outputs, generator=generator)
    wide = zip(use.streams, (width, outputs, 2), (torch.float32, torch.float32, torch.int64), strict=True)
    shapes = {name: Shape(2 * rows, columns, dtype) for name, columns, dtype in wide}
    waiting = [((0, use, keys, keys._version, None), gradients)]
    routine, arena = Taking(waiting, [(keys, gradients)], True, compiled_loops), Arena(shapes, pinned=False)
    for _ in range(2):
        found = routine.take(waiting, arena)
        assert found is not None and not found.needed
        ((held_keys, held_gradients, hashes),) = routine.each(held(found.room))
        assert held_gradients is not None and (hashes is not None) == (4 * width >= SHORTEST)
        assert held_keys.rows.equal(keys) and held_gradients.rows.equal(gradients)
        if hashes is not None:
            each = [f"{high:016x}{low:016x}" for high, low in hashes.rows.numpy().view(np.uint64).tolist()]
            assert each == [xxhash.xxh3_128_hexdigest(key.numpy().data) for key in keys]
        results, row = found.results, found.row
        columns = use.weight.columns(torch.float32, keys.device).double()
        heads = torch.cat([keys.double() @ columns.T, torch.ones(rows, 1)], dim=1)
        plain, size = heads.T @ gradients.double(), heads.T.abs() @ gradients.double().abs()
        sketch = torch.from_numpy(results[row, routine.at[0] : routine.at[1]]).reshape(5, outputs)
        spread = (keys.double().abs() @ columns.abs().T).sum() * gradients.abs().max()
        assert bool(((sketch - plain).abs() <= 1e-6 * (size + spread)).all())
        sizes = gradients.double().square().sum(1)
        of_weight, of_bias = results[row, :4].view(np.float64)
        assert of_bias == pytest.approx(float(sizes.sum()), rel=1e-5)
        assert of_weight == pytest.approx(float((sizes * keys.double().square().sum(1)).sum()), rel=1e-5)


def test_a_run_with_the_loops_is_judged_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noise(model: nn.Module, step: int) -> None:
        if step == 70:
            model[2].weight.grad.add_(1e-3)  # type: ignore[operator,union-attr,index]

    monkeypatch.setattr(swift, "PAYS", 1000)
    _, clean = run(tmp_path / "clean", steps=80, dtype=torch.float32)
    assert clean.certificate().exact
    _, noisy = run(tmp_path / "noisy", steps=80, dtype=torch.float32, before_step=noise)
    assert [(one.parameter, one.step) for one in noisy.manifest.findings] == [("2.weight", 70)]


def test_two_recordings_of_a_training_hash_its_gradients_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, by_torch = run(tmp_path / "torch", steps=40, dtype=torch.float32)
    numbers = sum(one.shape[0] * one.shape[1] for one in map(by_torch.initial, ("0.weight", "2.weight")))
    monkeypatch.setattr(swift, "PAYS", 20 * numbers)
    digests = [run(tmp_path / name, steps=40, dtype=torch.float32)[1].journal.digests for name in ("one", "two")]
    assert (digests[0] == digests[1]).all(), "whatever the process had done before"
    same = (digests[0] == by_torch.journal.digests).all(axis=1)
    assert same[:21].all() and not same[21:].all(), "the loops begin after the step at which they pay, and not before"


@pytest.mark.parametrize(
    "error, told",
    [
        (ModuleNotFoundError("No module named 'numba'", name="numba"), False),
        (ImportError("Numba needs NumPy 2.3 or less"), True),
        (ModuleNotFoundError("No module named 'llvmlite'", name="llvmlite"), True),
        (RuntimeError("no locator available for a cache"), True),
    ],
)
def test_without_numba_torch_does_the_work(
    error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise error

    monkeypatch.setattr("importlib.import_module", broken)
    loops = swift.Swift()
    loops.numbers = swift.PAYS + 1
    loops.reached(1)
    loops.reached(2)
    assert loops.project(torch.ones(2, 3), torch.ones(4, 3)) is None
    messages = [record.getMessage() for record in caplog.records if record.name == "dualform"]
    assert len(messages) == told, "once, and only where numba is there"
    assert all(str(error) in message for message in messages)


@pytest.mark.parametrize("steps, numbers", [(1, 1), (2, 7), (32, 3200)])
def test_what_is_followed_is_the_plain_sum(steps: int, numbers: int) -> None:
    loops = pytest.importorskip("dualform.recording.loops")
    generator = np.random.default_rng(steps)
    rows = generator.standard_normal((steps, numbers + 5), dtype=np.float32)[:, 2 : 2 + numbers]
    factors = generator.standard_normal((2, steps))
    moved, sizes = np.zeros((2, numbers)), np.empty(steps)
    loops.follow(rows.ctypes.data, rows.strides[0], factors, moved, sizes)
    wide = rows.astype(np.float64)
    assert np.allclose(moved, factors @ wide, rtol=1e-12, atol=1e-13)
    assert np.allclose(sizes, np.square(wide).sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 12])
def test_any_number_of_threads_does_every_part_once(count: int, threads: None, compiled_loops: swift.Swift) -> None:
    columns = torch.randn(4, 500)
    matrices = [torch.randn(rows, 500) for rows in (1, 300, 2000)]
    numbers = [number for matrix in matrices for number in projecting(matrix, columns)]
    table = compiled_loops.table(numbers, [HEAD + FIELDS * at + RESULT for at in range(3)])

    def is_done() -> bool:
        results = [torch.zeros(len(matrix), 4) for matrix in matrices]
        assert table.run([result.data_ptr() for result in results])
        return all(
            torch.allclose(result, matrix @ columns.T, rtol=1e-4, atol=1e-4)
            for matrix, result in zip(matrices, results, strict=True)
        )

    for number in (count, 1, count, 2):
        torch.set_num_threads(number)
        assert is_done()
    with ThreadPoolExecutor(1) as another:
        assert another.submit(is_done).result()


def test_a_new_thread_takes_no_more_threads_than_torch_was_told(
    threads: None, compiled_loops: swift.Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, columns, result = torch.ones(300, 500), torch.ones(4, 500), torch.zeros(300, 4)
    table = compiled_loops.table(projecting(matrix, columns), [HEAD + RESULT])
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as another:
        another.submit(table.run, [result.data_ptr()]).result()
    assert table._numbers[SHARES] == 1
    torch.set_num_threads(2)
    table.run([result.data_ptr()])
    assert table._numbers[SHARES] == 2
    # Another OpenMP, or none.
    monkeypatch.setattr(jobs, "threads_of_torch", lambda: None)
    alone = compiled_loops.table(projecting(matrix, columns), [HEAD + RESULT])
    result.zero_()
    assert alone.run([result.data_ptr()])
    assert alone._numbers[SHARES] == 1
    assert bool((result == 500).all())


def test_a_table_takes_as_many_numbers_as_change(compiled_loops: swift.Swift) -> None:
    matrix, result = torch.randn(3, 5), torch.zeros(3, 4)
    table = compiled_loops.table(projecting(matrix, torch.randn(4, 5)), [HEAD + RESULT])
    with pytest.raises(ValueError, match="1 numbers change, and 2 are given"):
        table.run([result.data_ptr(), 0])
    assert not result.any()


@pytest.mark.parametrize("row", [0, 150, 299])
def test_a_sketch_that_is_not_finite_is_told_of_once(row: int, threads: None, compiled_loops: swift.Swift) -> None:
    layer = nn.Linear(600, 2)
    (use,) = find_targets(layer, None, seed=0).uses
    keys, gradients = torch.randn(300, 600), torch.randn(300, 2)
    waiting = [((0, use, keys, keys._version, None), gradients)]
    widths = zip(use.streams, (600, 2, 2), (torch.float32, torch.float32, torch.int64), strict=True)
    shapes = {name: Shape(900, width, dtype) for name, width, dtype in widths}
    routine, arena = Taking(waiting, [(keys, gradients)], False, compiled_loops), Arena(shapes, pinned=False)
    needed = []
    for value in (1.0, float("inf"), 2.0):
        gradients[row, 1] = value
        found = routine.take(waiting, arena)
        assert found is not None
        needed.append(len(found.needed))
    assert needed == [0, 1, 0]


@pytest.mark.parametrize("of", ["keys", "gradients"])
def test_numbers_that_only_stand_for_their_negatives_are_not_read_as_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    class Negative(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return -x

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            return torch._neg_view(gradient)

    compiled(monkeypatch, room=4 << 10)
    x = torch.randn(20, 6)
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_error="raise") as recorder:
        for step in range(1, 61):
            ids = (torch.arange(5) + step) % 20
            keys = torch._neg_view(x[ids]) if of == "keys" and step % 2 else x[ids]
            with recorder.batch(ids):
                y = Negative.apply(model(keys)) if of == "gradients" and step % 2 else model(keys)
                F.cross_entropy(y, ids % 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    assert memory.certificate().exact
    for block in memory.blocks(0, memory.steps):
        sign = torch.where((block.steps % 2 == 1) & (of == "keys"), -1, 1)
        assert block.keys.equal(sign[:, None] * x[block.examples])
    for block in memory.blocks(1, memory.steps):
        # Cross-entropy lowers the output of every class but the right one, and the last layer sees it with its sign.
        sign = torch.where((block.steps % 2 == 1) & (of == "gradients"), -1, 1)
        right = block.gradients[torch.arange(len(block.examples)), block.examples % 4]
        assert bool((sign * right < 0).all())


def test_gradients_that_were_replaced_by_what_stands_for_their_negatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(monkeypatch, room=4 << 10)

    def turn(model: nn.Module, step: int) -> None:
        for parameter in [*model.parameters()][step % 2 :: 2]:
            assert parameter.grad is not None
            parameter.grad = torch._neg_view(-parameter.grad)

    model, memory = run(tmp_path / "run", before_step=turn, steps=60, dtype=torch.float32)
    assert memory.certificate().exact
    plain, _ = run(tmp_path / "plain", steps=60, dtype=torch.float32)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
