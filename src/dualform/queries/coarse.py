"""Keys in bytes, for where no bound tells keys apart: a scan reads a quarter, and an error that is known.

With x̂ of whole numbers up to 127 and a scale s of its own for every key, x·q is s x̂·q, but for at most
‖x − s x̂‖‖q‖ and the rounding of a product in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from dualform.fast import compiled, in_parts
from dualform.queries.flat import Products, at_a_time, multiply
from dualform.queries.shadow import Rows, widened

PART = 1 << 20  # numbers for which a thread of its own pays


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

    def products(self, queries: Float[Tensor, "queries dim_in"]) -> Iterator[Products]:
        """The products with all keys, nearly; each is there until the next ones are asked for."""
        asked = queries.float()
        most = min(at_a_time(len(asked)), len(self.bytes))
        buffer = torch.empty(most, len(asked))
        for at in range(0, len(self.bytes), max(most, 1)):
            here = slice(at, at + most)
            products = buffer[: len(self.bytes[here])]
            self._fill(products, asked, self.bytes[here], self.scales[here])
            yield Products(self.first + at, products, self.errors[here])

    def _fill(self, products: Tensor, asked: Tensor, rows: Tensor, scales: Tensor) -> None:
        fast = compiled(rows.numel())
        if fast is not None and len(asked) == 1:
            arrays = rows.numpy(), scales.numpy(), asked[0].numpy(), products[:, 0].numpy()
            in_parts(fast.byte_products, rows.numel() // PART, *arrays)
            return

        def wide(piece: slice) -> Tensor:
            if fast is None:
                return rows[piece].float() * scales[piece, None]
            result = torch.empty(len(rows[piece]), rows.shape[1])
            fast.widen(rows[piece].numpy(), scales[piece].numpy(), result.numpy())
            return result

        multiply(wide, asked, products)
