"""How all commands print: one table and one console; the same as plain text where rich isn't installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType
    from rich.table import Table as RichTable

Cell: TypeAlias = "str | tuple[str, str]"
"""Text, or text and its style."""


@dataclass(frozen=True)
class Table:
    """Cells in columns.

    Attributes:
        titles: one a column.
        rows: a cell a column each; an empty row is a gap.
        numbers: the columns that are set to the right.
        ruled: is there a line below the titles?
        space: blanks between columns.

    >>> print(Table(("What", "Tokens"), [("record", "4,096"), (("replay", "bold"), "64")], range(1, 2)))
    What    Tokens
    record   4,096
    replay      64
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: range = range(0)
    ruled: bool = False
    space: int = 2

    def __rich__(self) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable

        box = SIMPLE_HEAD if self.ruled else None
        padding = (0, self.space - self.ruled, 0, 0)  # a box has a blank of its own
        table = RichTable(box=box, pad_edge=False, padding=padding, header_style="bold")
        for column, title in enumerate(self.titles):
            justify: JustifyMethod = "right" if column in self.numbers else "left"
            table.add_column(title, justify=justify, overflow="fold")
        for row in self.rows:
            if row:
                table.add_row(*map(_styled, row))
            else:
                table.add_section()
        return table

    def __str__(self) -> str:
        rows = [self.titles, *([_plain(cell) for cell in row] for row in self.rows if row)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        set_to = [str.rjust if column in self.numbers else str.ljust for column in range(len(widths))]
        cells = (
            [put(cell, width) for put, cell, width in zip(set_to, row, widths, strict=True)] for row in rows
        )
        return "\n".join((" " * self.space).join(row).rstrip() for row in cells)


Part: TypeAlias = "Table | Cell | list[Cell]"
"""A table, or a line of one cell or several."""


def show(parts: Iterable[Part], *, soft_wrap: bool = False) -> None:
    """Print to the terminal, where rich isn't installed as plain text; with `soft_wrap` it is left to the
    terminal to break long lines."""
    try:
        console = terminal()
    except ImportError:
        sys.stdout.write(f"{as_text(parts)}\n")
    else:
        console.print(*map(_styled, parts), sep="\n", soft_wrap=soft_wrap)


def as_text(parts: Iterable[Part]) -> str:
    """The same, without rich."""
    return "\n".join(map(_plain, parts))


def terminal(*, stderr: bool = False) -> Console:
    """The console that commands print to, as wide as the terminal."""
    from rich.console import Console

    # Nobody's terminal: a log, where 80 columns would break paths in two.
    wide = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, width=110 if wide else None, highlight=False)


def _styled(part: Part) -> RenderableType:
    """As Text: a path may hold brackets, which are markup in a plain string."""
    from rich.text import Text

    if isinstance(part, Table):
        return part
    return Text.assemble(*part) if isinstance(part, list) else Text.assemble(part)


def _plain(part: Part) -> str:
    if isinstance(part, list):
        return "".join(map(_plain, part))
    return part[0] if isinstance(part, tuple) else str(part)
