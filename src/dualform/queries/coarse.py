"""Keys in bytes, for where no bound tells keys apart: a scan reads a quarter, and an error that is known.

With x̂ of whole numbers up to 127 and a scale s of its own for every key, x·q is s x̂·q, but for at most
‖x − s x̂‖‖q‖ and the rounding of a product in fp32. Where products of whole numbers are fast, it is s t x̂·q̂ with the
query in bytes too, but for ‖s x̂‖‖q − t q̂‖ more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64, Int8
from torch import Tensor

from dualform.fast import compiled
from dualform.queries import whole
from dualform.queries.flat import RANGE, at_a_time
from dualform.queries.shadow import Rows, widened
from dualform.queries.sieve import Tile
from dualform.queries.whole import Bytes


@dataclass(frozen=True, eq=False)
class Coarse:
    """Keys from a number on, as bytes times scales; `errors` are not below the largest of a product with a unit.

    A key that holds NaN or infinity has zeros in its place.
    """

    first: int
    bytes: Int8[Tensor, "keys dim_in"]
    scales: Float32[Tensor, " keys"]
    errors: Float32[Tensor, " keys"]

    def size(self) -> int:
        """The bytes of all parts."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every part by its name, as it is stored."""
        first = torch.tensor([self.first])
        return {"first": first, "bytes": self.bytes, "scales": self.scales, "errors": self.errors}

    @classmethod
    def of_tensors(cls, read: Callable[[str], Tensor]) -> Coarse:
        """As it was stored."""
        return cls(int(read("first")[0]), *map(read, ("bytes", "scales", "errors")))

    @classmethod
    def of(cls, rows: Rows, count: int, dim_in: int) -> Coarse:
        """Keys that come in the order of their numbers, block by block."""
        coarse = torch.zeros(count, dim_in, dtype=torch.int8)
        scales, errors = torch.zeros(count), torch.zeros(count)
        first, at = 0, 0
        for numbers, keys in rows():
            first = int(numbers[0]) if at == 0 else first
            wide = keys.double()
            wide = wide.where(wide.isfinite().all(dim=1, keepdim=True), 0.0)
            scale = (wide.abs().amax(dim=1) / 127).float() if dim_in else torch.zeros(len(keys))
            scale = scale.where(scale.isfinite(), 0.0)
            nearest = (wide / scale.double().clamp_min(1e-300)[:, None]).round_().clamp_(-127, 127)
            here = slice(at, at + len(keys))
            coarse[here], scales[here] = nearest.to(torch.int8), scale
            nearest *= scale.double()[:, None]
            size = torch.linalg.vector_norm(nearest, dim=1)
            left = torch.linalg.vector_norm(wide.sub_(nearest), dim=1)
            # Any order of summing d products in fp32 errs by at most d units; the rest is for the products themselves.
            errors[here] = widened(left + (dim_in + 16) * 2.0**-24 * size)
            at += len(keys)
        return cls(first, coarse, scales, errors)

    def tile(self, queries: Float64[Tensor, "queries dim_in"], norms: Float32[Tensor, " all_keys"]) -> Tile:
        """All of them for a flat scan; `norms` are not below those of all keys of the memory."""
        count, dim_in = queries.shape
        rows, here = at_a_time(count, dim_in), norms[self.first : self.first + len(self.bytes)]
        # Before its unit a product is up to 127 √d times the key's norm, and must not overflow in fp32.
        largest = float(here.where(here.isfinite(), 0.0).max()) if len(here) else 0.0
        if largest * 127 * dim_in**0.5 < RANGE and whole.suits(rows, dim_in, count):
            asked = Bytes.of(queries)

            def fill_whole(piece: slice, values: Tensor) -> None:
                if len(values) == rows:
                    whole.multiply(self.bytes[piece], asked.bytes, values)
                else:
                    padded = torch.zeros(rows, dim_in, dtype=torch.int8)
                    padded[: len(values)] = self.bytes[piece]
                    result = torch.empty(rows, count, dtype=torch.int32)
                    whole.multiply(padded, asked.bytes, result)
                    values.copy_(result[: len(values)])

            dtype, units = torch.int32, asked.scales.double()
            return Tile(self.first, fill_whole, dtype, self.scales, units, self.errors, here, asked.lost)
        narrow = queries.float()

        def fill(piece: slice, values: Tensor) -> None:
            fast = compiled(self.bytes[piece].numel())
            if fast is not None and count == 1:
                fast.byte_products(self.bytes[piece].numpy(), narrow[0].numpy(), values[:, 0].numpy())
            else:
                torch.mm(self.bytes[piece].float(), narrow.T, out=values)

        one, none = torch.ones(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        return Tile(self.first, fill, torch.float32, self.scales, one, self.errors, here, none)
