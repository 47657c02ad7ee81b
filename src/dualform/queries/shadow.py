"""The shadow of a weight's keys: narrow rows that bound every score from above.

The rows stand in descending order of their norm, so that a search stops where ‖x‖‖q‖ falls below what it has. With H
orthonormal, x·q ≤ (xH)·(qH) + ‖x_tail‖‖q_tail‖ is itself one product of a few columns. Everything is divided by a
power of two, so that no norm is above 1, and all rounding is inside the bound: it adds SLACK·‖x‖‖q‖.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dualform.fast import CUTS, LANES, SPANS, alone, compiled, in_parts, spread, threads

HEAD = 94  # columns of x H; with the tail and the norm 96 in all
BAND = 1024  # rows of similar norm, in an order in which those of a block are alike
SLACK = 1e-4
SAMPLE = 4096
FEW = 32  # queries for which no other thread pays
FEWEST = 3  # queries for which the compiled loop is faster than a product by torch
MANY = 256  # queries for which one pays whose heads are known
AT_A_TIME = 128  # queries: memory for more of them would come from the system, and be given back, every time
FRONT = 4096  # first rows of which the whole key is kept too: most of what is scored exactly is among them
WIDE = 1024  # columns beyond which not all eigenvectors are computed
TINY = 1e-30  # more than what underflow can lose where nothing is above 1

Rows = Callable[[], Iterator[tuple[Int64[Tensor, " rows"], Float[Tensor, "rows dim_in"]]]]

Levels = tuple[Float32[Tensor, "..."], ...]
Arrays = tuple[Float32[np.ndarray, "..."], ...]


@dataclass(frozen=True, eq=False)
class Shadow:
    """The shadow of some keys, in descending order of their norms; `numbers` says which key a row is.

    A row of `fine` is [x H | ‖x_tail‖ | ‖x‖], all over `scale`; `levels` have its first columns in blocks, with a tail
    for each of CUTS; `front` has the first keys whole; `norms` are the largest of whole bands. `odd` are the keys that
    hold NaN or infinity, or whose norm is too large: they are in no order.
    """

    scale: float
    basis: Float64[Tensor, "dim_in head"]
    numbers: Int64[Tensor, " rows"]
    norms: Float32[Tensor, " rows"]
    fine: Float32[Tensor, "rows fine"]
    levels: Levels
    front: Float[Tensor, "front dim_in"]
    odd: Int64[Tensor, " odd"]

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def padded(self) -> Float64[Tensor, "dim_in columns"]:
        """The basis, and columns of zeros: a product with whole vectors of columns is a fifth faster."""
        return torch.nn.functional.pad(self.basis, (0, -self.basis.shape[1] % 8))

    @cached_property
    def padded_array(self) -> Float64[np.ndarray, "dim_in columns"]:
        """The same as the compiled loops read it."""
        return self.padded.numpy()

    @cached_property
    def level_arrays(self) -> Arrays:
        """The levels as the compiled loops read them."""
        return tuple(level.numpy() for level in self.levels)

    def size(self) -> int:
        """The bytes of all parts."""
        return self._size

    @cached_property
    def _size(self) -> int:
        return self.padded.nbytes + sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every part by its name, as it is stored."""
        scale = torch.tensor([self.scale], dtype=torch.float64)
        return {
            "scale": scale, "basis": self.basis, "numbers": self.numbers, "norms": self.norms,
            "fine": self.fine, "front": self.front, "odd": self.odd,
        } | {f"level{at}": level for at, level in enumerate(self.levels)}  # fmt: skip

    @classmethod
    def of_tensors(cls, read: Callable[[str], Tensor]) -> Shadow:
        """A shadow as it was stored."""
        basis, numbers, norms, fine = map(read, ("basis", "numbers", "norms", "fine"))
        levels = tuple(read(f"level{at}") for at in range(len(CUTS)))
        return cls(float(read("scale")[0]), basis, numbers, norms, fine, levels, read("front"), read("odd"))


def build(rows: Rows, count: int, dim_in: int, room: int = 1 << 26) -> Shadow:
    """The shadow of `count` keys, which `rows` gives with their numbers, block by block, as often as it is called.

    Two passes: one for the norms and a sample of at most `room` bytes, one for the heads.
    """
    numbers = torch.empty(count, dtype=torch.int64)
    norms = torch.empty(count, dtype=torch.float64)
    stride, at = max(count // SAMPLE, 8 * dim_in * count // room, 1), 0
    # Made at once: small pieces between the blocks' own large ones would leave holes that nothing fits into.
    sample = torch.empty(len(range(0, count, stride)), dim_in, dtype=torch.float64)
    for found, keys in rows():
        numbers[at : at + len(keys)] = found
        norms[at : at + len(keys)] = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
        chosen = keys[-at % stride :: stride]
        sample[-(-at // stride) :][: len(chosen)] = chosen
        at += len(keys)
    sound = norms.isfinite()
    odd = numbers[~sound]
    scale = _scale(float(norms[sound].max()) if bool(sound.any()) else 0.0)
    basis = _basis(sample, scale, dim_in)
    del sample
    order = torch.argsort(norms.where(sound, -1.0), descending=True, stable=True)[: int(sound.sum())]
    place = torch.full((count,), -1, dtype=torch.int64)
    place[order] = torch.arange(len(order))
    fine = torch.empty(len(order), basis.shape[1] + 2)
    front, at = torch.empty(0, dim_in), 0
    for _, keys in rows():
        if at == 0:
            most = min(FRONT, room // (8 * dim_in) // BAND * BAND)
            front = torch.empty(min(most, len(order)), dim_in, dtype=keys.dtype)
        elif keys.dtype != front.dtype:
            front = front[:0]  # of different precision
        to = place[at : at + len(keys)]
        at += len(keys)
        keys, to = (keys, to) if bool((to >= 0).all()) else (keys[to >= 0], to[to >= 0])
        first = to < len(front)
        front[to[first]] = keys[first].to(front.dtype)
        scaled = keys.double() / scale
        head = scaled @ basis
        size = torch.linalg.vector_norm(scaled, dim=1)
        fine[to] = _row(head, size)
    numbers, largest = numbers[order], widened(norms[order] / scale)
    for at in range(0, len(order) - BAND + 1, BAND):
        band = slice(at, at + BAND)
        alike = _alike(fine[band])
        fine[band], numbers[band], largest[band] = fine[band][alike], numbers[band][alike], largest[at].clone()
        if at < len(front):
            front[band] = front[band][alike]
    return Shadow(scale, basis, numbers, largest, fine, leveled(fine), front, odd)


def _alike(band: Float32[Tensor, "band fine"]) -> Int64[Tensor, " band"]:
    """An order of a band's rows in which those of a block are alike, by halving along the widest column."""
    groups = torch.arange(BAND)[None]
    while groups.shape[1] > LANES:
        columns = band[groups, : min(CUTS[-1], band.shape[1] - 2)]
        widest = columns.var(dim=1).argmax(dim=1)
        along = columns.gather(2, widest[:, None, None].expand(-1, groups.shape[1], 1))[:, :, 0]
        groups = groups.gather(1, along.argsort(dim=1)).view(-1, groups.shape[1] // 2)
    return groups.flatten()


def _row(head: Float64[Tensor, "rows head"], size: Float64[Tensor, " rows"]) -> Float32[Tensor, "rows width"]:
    return torch.cat([head.float(), widened(_tail(head, size))[:, None], widened(size)[:, None]], dim=1)


def widened(sizes: Float64[Tensor, "*rows"]) -> Float32[Tensor, "*rows"]:
    """Sizes in fp32, surely not smaller than they were."""
    return (sizes * (1 + 1e-6) + TINY).float()


def _scale(largest: float) -> float:
    """A power of two that is not below the largest norm."""
    return math.ldexp(1.0, max(math.frexp(largest)[1], -1000)) if largest > 0 else 1.0


def _basis(sample: Float64[Tensor, "rows dim_in"], scale: float, dim_in: int) -> Float64[Tensor, "dim_in head"]:
    """Orthonormal columns along which the sample is largest, the most important first; any such columns are valid."""
    width = min(HEAD, dim_in)
    sample = sample[torch.isfinite(sample).all(dim=1)] / scale
    sample = sample[torch.linalg.vector_norm(sample, dim=1) <= 1.0]
    if len(sample) == 0:
        return torch.eye(dim_in, dtype=torch.float64)[:, :width]
    if dim_in > WIDE:
        return _leading_of_many(sample, width)
    values, vectors = torch.linalg.eigh(sample.T @ sample)
    leading = vectors[:, values.argsort(descending=True)[:width]]
    basis: Tensor = torch.linalg.qr(leading).Q
    return basis.contiguous()


def _leading_of_many(sample: Float64[Tensor, "rows dim_in"], width: int) -> Float64[Tensor, "dim_in head"]:
    """Nearly the same, by subspace iteration: all eigenvectors of a large matrix would take minutes."""
    some = torch.randn(
        sample.shape[1],
        min(width + 16, sample.shape[1]),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    for _ in range(3):
        some = torch.linalg.qr(sample.T @ (sample @ some)).Q
    values, vectors = torch.linalg.eigh((sample @ some).T @ (sample @ some))
    basis: Tensor = torch.linalg.qr(some @ vectors[:, values.argsort(descending=True)[:width]]).Q
    return basis.contiguous()


def leveled(
    fine: Float32[Tensor, "rows fine"],
    weights: Float32[Tensor, " rows"] | None = None,
    offsets: Float32[Tensor, " rows"] | None = None,
) -> Levels:
    """Rows in blocks of lanes, column by column: for each of CUTS the columns since the last, and the tail after it.

    Rows may be weighted; an offset is then a column of its own, before the others.
    """
    blocks = -(-len(fine) // LANES)
    levels = tuple(torch.zeros(blocks, stop - start + 1, LANES) for start, stop in SPANS)
    step = LANES * 128
    for at in range(0, len(fine), step):
        some = fine[at : at + step].double()
        head, tail = some[:, :-2], some[:, -2]
        if weights is not None:
            weight = weights[at : at + step].double()
            head, tail = weight[:, None] * head, weight.abs() * tail
        if offsets is not None:
            head = torch.cat([offsets[at : at + step, None].double(), head], dim=1)
        for level, part in zip(levels, _levels(head, tail), strict=True):
            part = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % LANES))
            level[at // LANES :][: len(part) // LANES] = part.view(-1, LANES, part.shape[1]).transpose(1, 2)
    return levels


def _levels(head: Float64[Tensor, "rows head"], tail: Float64[Tensor, " rows"]) -> Levels:
    """For each of CUTS the columns since the last and the tail after it, which is never too small."""
    head = torch.nn.functional.pad(head, (0, max(CUTS[-1] - head.shape[1], 0)))
    # Sums of squares from the last column on, no differences: nothing is lost.
    squares = torch.cat([tail.square()[:, None], head.square().flip(1)], dim=1).cumsum(dim=1)
    tails = widened(squares[:, [head.shape[1] - cut for cut in CUTS]].sqrt())
    narrow = head[:, : CUTS[-1]].float()
    return tuple(
        torch.cat([narrow[:, start:stop], tails[:, at : at + 1]], dim=1) for at, (start, stop) in enumerate(SPANS)
    )


def row_norms(queries: Float[Tensor, "queries dim_in"]) -> Float64[Tensor, " queries"]:
    """The norm of every query."""
    fast = compiled(0)
    if fast is not None and queries.dtype == torch.float32 and queries.is_contiguous():
        found = torch.empty(len(queries), dtype=torch.float64)
        in_parts(fast.norms, len(queries) // MANY, queries.numpy(), found.numpy())
        return found
    with alone():
        norms: Tensor = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    return norms


def some_at_a_time(function: Callable[[slice], Tensor], queries: int) -> Tensor:
    """What a function makes of some queries after the others, over all threads."""
    step = min(max(-(-queries // threads()), FEW), AT_A_TIME)
    parts = spread(function, [slice(at, at + step) for at in range(0, max(queries, 1), step)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Asked:
    """What the rows of a shadow are multiplied with, for queries whose norm (with their offset) is at most 1."""

    levels: Arrays
    fine: Float32[np.ndarray, "queries fine"]
    offsets: Float32[np.ndarray, " queries"] | None

    @classmethod
    def of(
        cls,
        shadow: Shadow,
        queries: Float[Tensor, "queries dim_in"],
        scales: Float64[Tensor, " queries"],
        sizes: Float64[Tensor, " queries"],
        extended: bool = False,
    ) -> Asked:
        """Queries times their scales, which gives them these norms; [q, 1] so where they are `extended`."""
        fast, count = compiled(0), len(queries)
        if fast is None:
            head = _heads(shadow, queries)[:, : shadow.basis.shape[1]] * scales[:, None]
            tail = _tail(head, sizes)
            fine = torch.cat([head, tail[:, None], torch.full_like(tail, SLACK)[:, None]], dim=1).float().numpy()
            if extended:
                head = torch.cat([scales[:, None], head], dim=1)
            levels = tuple(level.numpy() for level in _levels(head, tail))
            return cls(levels, fine, scales.float().numpy() if extended else None)
        if count <= FEWEST and queries.dtype == torch.float32 and queries.is_contiguous():
            heads = np.zeros((count, shadow.padded.shape[1]))
            fast.project(queries.numpy(), shadow.padded_array, heads)
        else:
            heads = _heads(shadow, queries).numpy()
        levels = tuple(np.empty((count, stop - start + 1), np.float32) for start, stop in SPANS)
        fine, factors = np.empty((count, shadow.basis.shape[1] + 2), np.float32), scales.numpy()
        in_parts(fast.ask, count // MANY, heads, sizes.numpy(), factors, extended, SLACK, levels, fine)
        return cls(levels, fine, factors.astype(np.float32) if extended else None)

    def __getitem__(self, which: Int64[np.ndarray, " some"]) -> Asked:
        offsets = None if self.offsets is None else self.offsets[which]
        return Asked(tuple(level[which] for level in self.levels), self.fine[which], offsets)


def _heads(shadow: Shadow, queries: Float[Tensor, "queries dim_in"]) -> Float64[Tensor, "queries columns"]:
    return some_at_a_time(lambda part: queries[part].double() @ shadow.padded, len(queries))


def _tail(head: Float64[Tensor, "rows head"], size: Float64[Tensor, " rows"]) -> Float64[Tensor, " rows"]:
    """What is left of a norm beside its head, surely not too little."""
    tail = (size.square() - head.square().sum(dim=1)).clamp_min(0.0).sqrt()
    # The difference of two squares is known to some 1e-16 of them, its root to 1e-8 of the norm.
    return (tail + 1e-7 * size) * (1 + 1e-6) + TINY
