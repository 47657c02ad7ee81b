"""What is known of a memory as plain tables: its weights and its certificate."""

from collections.abc import Sequence

from dualform.api import Memory
from dualform.dual.certificate import CertificateRow
from dualform.errors import MissingExtra

try:
    from rich import box
    from rich.table import Table
except ModuleNotFoundError as error:
    raise MissingExtra("Tables need rich, which is not installed: pip install 'dualform[cli]'") from error


def weights_table(memory: Memory) -> Table:
    """Return a table of the memory's weights: the layers that use each, its shape and its events."""
    table = Table("weight", "layers", box=box.SIMPLE_HEAD)
    for heading in ("dim_in", "dim_out", "events"):
        table.add_column(heading, justify="right")
    for number, weight in enumerate(memory.manifest.weights):
        layers = ", ".join(use.map for use in weight.uses)
        sizes = (weight.dim_in, weight.dim_out, memory.manifest.events(number))
        table.add_row(weight.name, layers, *(f"{value:,}" for value in sizes))
    return table


def certificate_sentence(rows: Sequence[CertificateRow]) -> str:
    """Say in one sentence whether the memory accounts for every weight."""
    lost = [row.weight for row in rows if not row.exact]
    if lost:
        return f"Not exact: the recorded events do not account for {', '.join(lost)}; the table says why."
    return "Exact: every weight equals its initial value plus what its recorded events added, up to rounding."


def certificate_table(rows: Sequence[CertificateRow]) -> Table:
    """Return the certificate: each weight's distance from its dual form, and rounding alone."""
    table = Table("weight", box=box.SIMPLE_HEAD)
    for heading in ("step", "residual", "rounding"):
        table.add_column(heading, justify="right")
    table.add_column("exact")
    for row in rows:
        verdict = "yes" if row.exact else f"no: {row.reason}"
        table.add_row(row.weight, f"{row.step:,}", _number(row.residual), _number(row.rounding), verdict)
    return table


def size(count: int) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> size(6_131_712_000), size(812)
    ('6.1 GB', '812 B')
    """
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
