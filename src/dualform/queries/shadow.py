"""The shadow of a weight's keys: narrow rows that bound every score from above.

The rows stand in descending order of their norm, so that a search stops where ‖x‖‖q‖ falls below what it has. With H
orthonormal, x·q ≤ (xH)·(qH) + ‖x_tail‖‖q_tail‖ is itself one product of a few columns. Everything is divided by a
power of two, so that no norm is above 1, and all rounding is inside the bound: it adds SLACK·‖x‖‖q‖.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

HEADS = (30, 126)  # columns of x H, from coarse to fine; with the tail and the norm 32 and 128 in all
SLACK = 1e-4
SAMPLE = 4096
FRONT = 4096  # first rows of which the whole key is kept too: most of what is scored exactly is among them
WIDE = 1024  # columns beyond which not all eigenvectors are computed
TINY = 1e-30  # more than what underflow can lose where nothing is above 1

Rows = Callable[[], Iterator[tuple[Int64[Tensor, " rows"], Float[Tensor, "rows dim_in"]]]]


@dataclass(frozen=True, eq=False)
class Shadow:
    """The shadow of some keys, in descending order of their norms; `numbers` says which key a row is.

    A row of `heads` is [x H | ‖x_tail‖ | ‖x‖], all over `scale`; `front` has the first keys whole. `odd` are the keys
    that hold NaN or infinity, or whose norm is too large: they are in no order.
    """

    scale: float
    basis: Float64[Tensor, "dim_in head"]
    numbers: Int64[Tensor, " rows"]
    norms: Float32[Tensor, " rows"]
    heads: tuple[Float32[Tensor, "rows coarse"], Float32[Tensor, "rows fine"]]
    front: Float[Tensor, "front dim_in"]
    odd: Int64[Tensor, " odd"]

    def __len__(self) -> int:
        return len(self.numbers)

    def tensors(self) -> dict[str, Tensor]:
        """Every part by its name, as it is stored."""
        coarse, fine = self.heads
        scale = torch.tensor([self.scale], dtype=torch.float64)
        return {
            "scale": scale, "basis": self.basis, "numbers": self.numbers, "norms": self.norms,
            "coarse": coarse, "fine": fine, "front": self.front, "odd": self.odd,
        }  # fmt: skip

    @classmethod
    def of_tensors(cls, read: Callable[[str], Tensor]) -> Shadow:
        """A shadow as it was stored."""
        heads = (read("coarse"), read("fine"))
        scale = float(read("scale")[0])
        return cls(scale, read("basis"), read("numbers"), read("norms"), heads, read("front"), read("odd"))


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
    widths = [min(head, basis.shape[1]) for head in HEADS]
    coarse, fine = (torch.empty(len(order), width + 2) for width in widths)
    front, at = torch.empty(0, dim_in), 0
    for _, keys in rows():
        if at == 0:
            front = torch.empty(min(FRONT, len(order), room // (8 * dim_in)), dim_in, dtype=keys.dtype)
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
        for heads, width in zip((coarse, fine), widths, strict=True):
            heads[to] = _row(head[:, :width], size)
    largest = widened(norms[order] / scale)
    return Shadow(scale, basis, numbers[order], largest, (coarse, fine), front, odd)


def _row(head: Float64[Tensor, "rows head"], size: Float64[Tensor, " rows"]) -> Float32[Tensor, "rows width"]:
    tail = (size.square() - head.square().sum(dim=1)).clamp_min(0.0).sqrt()
    # The difference of two squares is known to some 1e-16 of them, its root to 1e-8 of the norm.
    tail = tail + 1e-7 * size
    return torch.cat([head.float(), widened(tail)[:, None], widened(size)[:, None]], dim=1)


def widened(sizes: Float64[Tensor, " rows"]) -> Float32[Tensor, " rows"]:
    """Sizes in fp32, surely not smaller than they were."""
    return (sizes * (1 + 1e-6) + TINY).float()


def _scale(largest: float) -> float:
    """A power of two that is not below the largest norm."""
    return math.ldexp(1.0, max(math.frexp(largest)[1], -1000)) if largest > 0 else 1.0


def _basis(sample: Float64[Tensor, "rows dim_in"], scale: float, dim_in: int) -> Float64[Tensor, "dim_in head"]:
    """Orthonormal columns along which the sample is largest, the most important first; any such columns are valid."""
    width = min(HEADS[-1], dim_in)
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


def query_rows(
    shadow: Shadow, queries: Float64[Tensor, "queries dim_in"], offsets: Float64[Tensor, " queries"] | None
) -> tuple[Float32[Tensor, "queries coarse"], Float32[Tensor, "queries fine"]]:
    """What the rows of each level are multiplied with: queries whose norm (with their offset) is at most 1."""
    head = queries @ shadow.basis
    size = torch.linalg.vector_norm(queries, dim=1, keepdim=True)
    constant = torch.full_like(size, SLACK)
    rest = [constant] if offsets is None else [constant, offsets[:, None]]
    levels = []
    for rows in shadow.heads:
        part = head[:, : rows.shape[1] - 2]
        tail = (size.square() - part.square().sum(dim=1, keepdim=True)).clamp_min(0.0).sqrt()
        tail = (tail + 1e-7 * size) * (1 + 1e-6) + TINY
        levels.append(torch.cat([part, tail, *rest], dim=1).float())
    return levels[0], levels[1]
