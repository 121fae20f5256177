"""Tables on stdout: as wide as they need, with borders only where a person looks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["print_table"]


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, console: Console | None = None
) -> None:
    """Print rows under `columns`; a column whose heading starts with ">" is aligned to the right."""
    console = console or Console(soft_wrap=True)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    width = max(console.width, console.measure(table).maximum) if not console.is_terminal else None
    console.print(table, width=width)


def _plain(text: str) -> str:
    # names of tensors may hold brackets, which rich would take for markup
    return text.replace("[", r"\[")
