"""The loops that numba compiles: each number is read once. Threads take parts of a loop, without the GIL."""

from dualform.compiled.asking import ask, norms, project
from dualform.compiled.bytewise import byte_products
from dualform.compiled.cascading import cascade
from dualform.compiled.pairs import products, read_rows, rounded
from dualform.compiled.picking import pick
from dualform.compiled.sifting import sift

__all__ = [
    "ask",
    "byte_products",
    "cascade",
    "norms",
    "pick",
    "products",
    "project",
    "read_rows",
    "rounded",
    "sift",
]
