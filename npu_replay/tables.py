"""How all commands print: tables and lines, folded to the terminal's width, and in a pipe to 80 columns."""

from __future__ import annotations

import contextlib
import io
import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias

from npu_replay import screen

Cell: TypeAlias = "str | tuple[str, str]"
"""Text, or text and its style, such as "bold red", which a terminal shows and a pipe doesn't."""
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_GAP = "  "
_LEAST = 10
"""A column of words isn't made narrower than this."""


@dataclass(frozen=True)
class Table:
    """Cells in columns.

    Attributes:
        titles: one a column.
        rows: a cell a column each.
        numbers: the columns that are set to the right, and in which no word is folded.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: range = range(0)

    def lines(self, columns: int, colours: bool) -> Iterator[str]:
        """Yield its lines, folded to so many columns."""
        rows = [[_styled(cell) for cell in row] for row in self.rows]
        rows.insert(0, [(title, "bold") for title in self.titles])
        widths = self._widths([[text for text, _ in column] for column in zip(*rows, strict=True)], columns)
        for number, row in enumerate(rows):
            folded = [_folded(text, wide) for (text, _), wide in zip(row, widths, strict=True)]
            height = max(map(len, folded))
            for line in range(height):
                cells = []
                for column, texts in enumerate(folded):
                    at = line if number else line - height + len(texts)  # titles stand right above the cells
                    text = texts[at] if 0 <= at < len(texts) else ""
                    painted, blanks = (
                        _paint(text, row[column][1], colours),
                        " " * (widths[column] - len(text)),
                    )
                    cells.append(blanks + painted if column in self.numbers else painted + blanks)
                yield _GAP.join(cells).rstrip()

    def _widths(self, texts: list[list[str]], columns: int) -> list[int]:
        """Return each column's width: the one with the most to give gives way, blank by blank."""
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


def width() -> int:
    """Return how many columns there are: COLUMNS, else the terminal's, else 80."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    with contextlib.suppress(OSError):  # no terminal
        return os.get_terminal_size(screen.out().fileno()).columns or 80
    return 80


def show(parts: Iterable[Part], to: TextIO | None = None) -> None:
    """Print to the user's stdout, or to another stream; each part begins a line of its own."""
    stream = to or screen.out()
    colours = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for part in parts:
        lines = part.lines(width(), colours) if isinstance(part, Table) else [_line(part, colours)]
        stream.writelines(f"{line}\n" for line in lines)
    stream.flush()


def as_text(parts: Iterable[Part]) -> str:
    """Return what a file would get, without its last line end."""
    stream = io.StringIO()
    show(parts, to=stream)
    return stream.getvalue().removesuffix("\n")


def show_error(said: str, *hints: str, as_json: bool) -> None:
    """Say on stderr what a command ended in; under --json stdout has it as its one document."""
    show([[("Error: ", "bold red"), said], *((hint, "dim") for hint in hints)], to=screen.err())
    if as_json:
        print_json({"error": said})


def print_json(found: Any) -> None:
    """Print one JSON document on stdout, from what json can write or from its text."""
    screen.out().write(f"{found if isinstance(found, str) else to_json(found)}\n")
    screen.out().flush()


def to_json(found: Any) -> str:
    """Return the text that commands print and write."""
    return json.dumps(found, indent=1)


def wrapped(text: str, columns: int, indent: str = "") -> str:
    """Fold between words; a longer word, such as a path, stays whole."""
    fold = textwrap.TextWrapper(
        columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )
    return "\n".join(fold.fill(line) for line in text.split("\n"))


def _line(part: Cell | list[Cell], colours: bool) -> str:
    """Fold a line. Blanks become line ends, so each cell keeps its length, and its style."""
    cells = [_styled(cell) for cell in (part if isinstance(part, list) else [part])]
    text, found = wrapped("".join(cell for cell, _ in cells), width()), ""
    for cell, style in cells:
        found += _paint(text[: len(cell)], style, colours)
        text = text[len(cell) :]
    return found


def _folded(text: str, columns: int) -> list[str]:
    """Fold a cell. A long word is folded too: the columns after it stay in their place."""
    lines = [textwrap.wrap(line, columns, break_on_hyphens=False) or [""] for line in text.split("\n")]
    return [line for some in lines for line in some]


def _styled(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell


def _paint(text: str, style: str, colours: bool) -> str:
    """Give a text its style in the codes of terminals."""
    codes = ";".join(_CODES[word] for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if colours and codes and text else text
