"""Questions to a memory: scores, reducers, and the spotlight that is read off them."""

from dualform.queries.attend import attend, check_model, given_queries
from dualform.queries.results import Explanation, Timeline, TopEvents, TopGroups, Totals
from dualform.queries.spotlight import Attention, Contributions, Spotlight

__all__ = [
    "Attention",
    "Contributions",
    "Explanation",
    "Spotlight",
    "Timeline",
    "TopEvents",
    "TopGroups",
    "Totals",
    "attend",
    "check_model",
    "given_queries",
]
