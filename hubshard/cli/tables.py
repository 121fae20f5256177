"""Tables: fitted to the terminal, and as wide as they need where the output goes elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["print_table"]

_WIDE = 4096


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, stderr: bool = False) -> None:
    """Print rows under `columns`; one whose heading starts with ">" is aligned to the right, the last one may wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns, start=1):
        name, is_number = column.removeprefix(">"), column.startswith(">")
        flexible = number == len(columns) and not is_number
        table.add_column(name, justify="right" if is_number else "left", no_wrap=not flexible, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE, stderr=stderr)
    console.print(table)
