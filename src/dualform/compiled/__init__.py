"""The loops that numba compiles: each number is read once. Threads take parts of a loop, without the GIL."""

from dualform.compiled.asking import ask, norms
from dualform.compiled.bytewise import byte_products, widen
from dualform.compiled.cascading import cascade
from dualform.compiled.pairs import above, products, read_rows, rounded
from dualform.compiled.picking import pick

__all__ = ["above", "ask", "byte_products", "cascade", "norms", "pick", "products", "read_rows", "rounded", "widen"]
