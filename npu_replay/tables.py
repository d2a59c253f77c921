"""How all commands print: tables and lines, folded to the terminal's width, and in a pipe to 80 columns.

rich, where it is installed, gives them colours; the text is the same with it and without.
"""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TextIO, TypeAlias

from npu_replay import screen

Cell: TypeAlias = "str | tuple[str, str]"
"""Text, or text and its style."""
_GAP = "  "
_LEAST = 10
"""A column of words isn't made narrower than this."""


def width() -> int:
    """Columns that there are: COLUMNS, else the terminal's, else 80."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    with contextlib.suppress(OSError):  # no terminal
        return os.get_terminal_size(screen.out().fileno()).columns or 80
    return 80


@dataclass(frozen=True)
class Table:
    """Cells in columns.

    Attributes:
        titles: one a column.
        rows: a cell a column each.
        numbers: the columns that are set to the right, and in which no word is folded.

    >>> print(Table(("What", "Tokens"), [("record", "4,096"), (("replay", "bold"), "64")], range(1, 2)))
    What    Tokens
    record   4,096
    replay      64
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: range = range(0)

    def __str__(self) -> str:
        return "".join(text for text, _ in self.segments(80))

    def segments(self, columns: int) -> Iterator[tuple[str, str]]:
        """Pieces of text and their styles, in lines of so many columns, the last without its end."""
        rows = [[(title, "bold") for title in self.titles], *(map(_styled, row) for row in self.rows)]
        rows = [list(row) for row in rows]
        widths = self._widths([[text for text, _ in row] for row in rows], columns)
        for number, row in enumerate(rows):
            folded = [_folded(text, wide) for (text, _), wide in zip(row, widths, strict=True)]
            if not number:  # titles stand on the line above the cells
                most = max(map(len, folded))
                folded = [[""] * (most - len(lines)) + lines for lines in folded]
            for line, cells in enumerate(zip_longest(*folded, fillvalue="")):
                yield "\n" if number or line else "", ""
                yield from self._line(cells, widths, [style for _, style in row])

    def _line(self, cells: Sequence[str], widths: list[int], styles: list[str]) -> Iterator[tuple[str, str]]:
        last = max((column for column, cell in enumerate(cells) if cell), default=-1)
        for column, cell in enumerate(cells[: last + 1]):
            blanks = " " * (widths[column] - len(cell))
            before, after = (blanks, "") if column in self.numbers else ("", blanks)
            yield (_GAP if column else "") + before, ""
            yield cell, styles[column]
            yield after if column < last else "", ""

    def _widths(self, rows: list[list[str]], columns: int) -> list[int]:
        """The widest column that can be folded gives way, blank by blank."""
        texts = list(zip(*rows, strict=True))
        widths = [max(len(line) for text in column for line in text.split("\n")) for column in texts]
        least = [min(wide, _LEAST) for wide in widths]
        for whole in (True, False):  # first the titles of numbers, then what stands beside a number
            for column in self.numbers:
                title, *cells = texts[column]
                words = [*title.split(), *(cells if whole else " ".join(cells).split())]
                least[column] = max(map(len, words), default=0)
            while sum(widths) + len(_GAP) * (len(widths) - 1) > columns:
                room = [one - low for one, low in zip(widths, least, strict=True)]
                if max(room) <= 0:
                    break
                widths[room.index(max(room))] -= 1
        return widths


Part: TypeAlias = "Table | Cell | list[Cell]"
"""A table, or a line of one cell or several."""


def show(parts: Iterable[Part], to: TextIO | None = None) -> None:
    """Print to the user's stdout, or to another stream; each part begins a line of its own."""
    segments = list(_all(parts))
    stream = to or screen.out()
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        stream.write("".join(text for text, _ in segments))
    else:
        console = Console(file=stream, highlight=False)
        with console.capture() as shown:  # written by rich, a closed pipe would end in its exit code
            console.print(Text.assemble(*segments[:-1]), soft_wrap=True)
        stream.write(shown.get())
    stream.flush()


def show_error(said: str, *hints: str, as_json: bool) -> None:
    """Say on stderr what a command ended in; under --json stdout has it as its one document."""
    show([[("Error: ", "bold red"), said], *((hint, "dim") for hint in hints)], to=screen.err())
    if as_json:
        print_json({"error": said})


def print_json(found: Any) -> None:
    """One JSON document on stdout, from what json can write or from its text."""
    screen.out().write(f"{found if isinstance(found, str) else to_json(found)}\n")
    screen.out().flush()


def to_json(found: Any) -> str:
    """As commands print and write it."""
    return json.dumps(found, indent=1)


def as_text(parts: Iterable[Part]) -> str:
    """The same, without colours."""
    return "".join(text for text, _ in _all(parts))[:-1]


def _all(parts: Iterable[Part]) -> Iterator[tuple[str, str]]:
    columns = width()
    for part in parts:
        yield from part.segments(columns) if isinstance(part, Table) else _wrapped(part, columns)
        yield "\n", ""


def _wrapped(part: Cell | list[Cell], columns: int) -> Iterator[tuple[str, str]]:
    """A line of words, in which blanks become line ends; each cell keeps its length, and so its style."""
    cells = [_styled(cell) for cell in (part if isinstance(part, list) else [part])]
    text, start = wrapped("".join(cell for cell, _ in cells), columns), 0
    for cell, style in cells:
        yield text[start : start + len(cell)], style
        start += len(cell)


def wrapped(text: str, columns: int, indent: str = "") -> str:
    """Folded between words; a longer word, such as a path, stays whole."""
    fold = textwrap.TextWrapper(
        columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )
    return "\n".join(fold.fill(line) for line in text.split("\n"))


def _folded(text: str, columns: int) -> list[str]:
    """In a cell a long word is folded too: the columns after it stay in their place."""
    lines = [textwrap.wrap(line, columns, break_on_hyphens=False) or [""] for line in text.split("\n")]
    return [line for some in lines for line in some]


def _styled(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell
