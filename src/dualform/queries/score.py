"""The one score: the dot product of key and query, correctly rounded to fp32.

Any engine may get there by any order of summation: a score is the exact real number rounded once, so it is bit
for bit the same however the rows were split. A product in fp64 with a rigorous bound on its error decides
nearly every row; the few that lie too close to the border of two fp32 numbers are computed exactly.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from dualform.queries.pairs import rounded_products

_UNIT = 2.0**-53
_TINY = 2.0**-1000
FEW = 512  # pairs that are summed one by one


def products(
    keys: Float[Tensor, "events dim_in"], queries: Float[Tensor, "queries dim_in"]
) -> Float64[Tensor, "queries events"]:
    """α_t = x_t · q in fp64, for sums."""
    return queries.double() @ keys.double().T


def scores(
    keys: Float[Tensor, "events dim_in"], queries: Float[Tensor, "queries dim_in"]
) -> Float32[Tensor, "queries events"]:
    """α_t = x_t · q of every pair, the exact value rounded to the nearest fp32 number.

    >>> scores(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """
    near = products(keys, queries) + 0.0  # a sum of zeros is +0, in whatever order it was formed
    key_norms = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
    query_norms = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    # Any order of summing d products errs by at most d units of Σ|x||q| ≤ ‖x‖‖q‖; the rest is for the bound itself.
    error = (keys.shape[1] + 4) * _UNIT * query_norms[:, None] * key_norms + _TINY
    low, high = (near - error).float(), (near + error).float()
    result = near.float()
    unsure = low != high
    if not bool(near.isfinite().all()):
        # NaN and infinity are certain where an input holds them, and an overflow of fp64 where none does.
        tame = queries.isfinite().all(dim=1)[:, None] & keys.isfinite().all(dim=1)
        unsure = (unsure | ~near.isfinite()) & tame
    if bool(unsure.any()):
        at_query, at_key = unsure.nonzero(as_tuple=True)
        result[at_query, at_key] = _exact(keys, queries, at_key, at_query)
    return result


def pair_scores(
    keys: Float[Tensor, "events dim_in"],
    queries: Float[Tensor, "queries dim_in"],
    at_key: Int64[Tensor, " pairs"],
    at_query: Int64[Tensor, " pairs"],
    key_norms: Float64[Tensor, " events"] | None = None,
    query_norms: Float64[Tensor, " queries"] | None = None,
) -> Float32[Tensor, " pairs"]:
    """The same scores, of some pairs only; keys and queries are finite, and the norms not below theirs."""
    if key_norms is None:
        key_norms = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
    if query_norms is None:
        query_norms = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    error = (keys.shape[1] + 4) * _UNIT
    result, unsure = rounded_products(keys, queries, at_key, at_query, key_norms, query_norms, error, _TINY)
    if unsure is not None:
        result[unsure] = _exact(keys, queries, at_key[unsure], at_query[unsure])
    return result


def square_norms(rows: Float[Tensor, "events dim"]) -> Float32[Tensor, " events"]:
    """‖x‖² of every row: its score with itself."""
    near: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
    error = (2 * rows.shape[1] + 8) * _UNIT * near + _TINY
    result = near.float()
    unsure = ((near - error).float() != (near + error).float()) & near.isfinite()
    at = unsure.nonzero()[:, 0]
    if len(at):
        result[at] = _exact(rows, rows, at, at)
    return result


def _exact(
    keys: Tensor, queries: Tensor, at_key: Int64[Tensor, " pairs"], at_query: Int64[Tensor, " pairs"]
) -> Float32[Tensor, " pairs"]:
    """The exact dot products of some pairs, rounded to fp32."""
    exact_products = torch.float64 not in (keys.dtype, queries.dtype)
    if exact_products and len(at_key) <= FEW:
        terms = keys[at_key].double() * queries[at_query].double()
        return torch.tensor([_summed(row) for row in terms.tolist()], dtype=torch.float32)
    parts = []
    for start in range(0, len(at_key), 4096):
        x = keys[at_key[start : start + 4096]].double()
        q = queries[at_query[start : start + 4096]].double()
        parts.append(_exact_rows(x, q, exact_products))
    return torch.cat(parts)


def _summed(terms: list[float]) -> float:
    """The sum of exact terms, rounded once to fp32."""
    total = math.fsum(terms) + 0.0
    with np.errstate(over="ignore"):
        near = np.float32(total)
        other = np.nextafter(near, np.float32(np.inf if total > float(near) else -np.inf))
    if not np.isfinite(near) or not np.isfinite(other):
        return _nearest(sum(map(Fraction, terms), Fraction(0)))
    if 2.0 * total == float(near) + float(other):
        # Half-way in fp64: what was lost there decides, and nothing lost means ties to even, as numpy rounds.
        rest = math.fsum([*terms, -total])
        if rest != 0.0:
            return float(max(near, other) if rest > 0 else min(near, other))
    return float(near)


def _exact_rows(x: Tensor, q: Tensor, exact_products: bool) -> Float32[Tensor, " pairs"]:
    terms = x * q
    size = terms.abs().sum(dim=1)
    total, rest, lost = (torch.zeros(len(x), dtype=torch.float64) for _ in range(3))
    for term in terms.unbind(1):
        # Knuth's two-sum: total + error is exactly total + term.
        both = total + term
        shadow = both - total
        error = (total - (both - shadow)) + (term - shadow)
        rest, lost = rest + error, lost + error.abs()
        total = both
    near = total + rest
    error = 2 * _UNIT * near.abs() + (x.shape[1] * _UNIT) ** 2 * size
    if not exact_products:
        error = error + x.shape[1] * _UNIT * size + _TINY
    # Where no product and no addition lost anything, the sum is exact.
    error = torch.where((lost == 0) & exact_products, 0.0, error)
    low, high = (near - error).float(), (near + error).float()
    result = near.float() + 0.0
    for at in (((low != high) | ~near.isfinite()) & (size > 0)).nonzero()[:, 0].tolist():
        pairs = zip(x[at].tolist(), q[at].tolist(), strict=True)
        result[at] = _nearest(sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0)))
    return result


def _nearest(value: Fraction) -> float:
    """The fp32 number nearest to an exact value, ties to even."""
    border = Fraction(2**128 - 2**103)  # half-way between the largest fp32 number and the next power of two
    if abs(value) >= border:
        return float("inf") if value > 0 else float("-inf")
    largest = float(np.finfo(np.float32).max)
    guess = np.float32(min(max(float(value), -largest), largest))
    with np.errstate(over="ignore"):
        around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    finite = [c for c in around if np.isfinite(c)]
    best = min(finite, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.uint32)) & 1))
    return float(best)
