"""Exact scores of pairs whose bounds are known: the best bounds first, so that their scores rule out others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dualform.queries.found import Found
from dualform.queries.pairs import by_query, ranks

MORE = 4  # than k that are scored first
FEW_MORE = 1.5  # times as many, up to which all are scored at once


def best_first(
    found: Found,
    at_query: Int64[Tensor, " pairs"],
    bounds: Float[Tensor, " pairs"],
    score: Callable[[Int64[Tensor, " some"]], Float[Tensor, " some"]],
    reached: Callable[[], Float[np.ndarray, " queries"]],
    pays: Callable[[Int64[Tensor, " some"]], bool] = lambda _: True,
) -> tuple[Int64[Tensor, " some"], Float[Tensor, " some"]] | None:
    """Which pairs were scored, and their scores; the others cannot be among the best. None where that does not pay.

    `score` gives exact scores of some pairs, and `reached` what k rows surely have, as bounds are.
    """
    if len(at_query) <= FEW_MORE * (found.k + MORE) * found.queries and pays(every := torch.arange(len(at_query))):
        return every, score(every)
    # For some thousand numbers numpy's operations take a fraction of torch's.
    order = by_query(at_query, bounds).numpy()
    query, bound = at_query.numpy()[order], bounds.numpy()[order]
    rank = ranks(torch.from_numpy(query), found.queries).numpy()
    k, most = found.k, found.k + MORE
    taken = rank < most
    some = torch.from_numpy(order[taken])
    scores = score(some)
    first = np.full((found.queries, most), -np.inf)
    first[query[taken], rank[taken]] = scores.numpy()
    found.raise_to(torch.from_numpy(np.partition(first, most - k, axis=1)[:, most - k]))
    later = torch.from_numpy(order[~taken & (bound >= reached()[query])])
    if not pays(later):
        return None
    if len(later):
        some, scores = torch.cat([some, later]), torch.cat([scores, score(later)])
    return some, scores
