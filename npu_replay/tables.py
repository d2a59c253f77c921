"""Print the output of all commands: tables and lines, folded to the terminal's width, or to 80 columns."""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias

from npu_replay import screen

Cell: TypeAlias = "str | tuple[str, str]"
"""Text, or text and its style, such as "bold red", which is shown in a terminal only."""
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_GAP = "  "
_WORDS: dict[str, Any] = {"break_on_hyphens": False, "expand_tabs": False}
_LEAST = 10
"""The least width to which a column of words is narrowed."""


@dataclass(frozen=True)
class Table:
    """Holds titles and rows of cells; columns in `numbers` are right-aligned and not folded."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: range = range(0)

    def lines(self, columns: int, colours: bool) -> Iterator[str]:
        """Yield the lines of the table, folded to this number of columns."""
        rows = [[(title, "bold") for title in self.titles], *(list(map(_styled, row)) for row in self.rows)]
        widths = self._widths([[text for text, _ in column] for column in zip(*rows, strict=True)], columns)
        for number, row in enumerate(rows):
            # Long words are folded, too, so that later columns stay aligned.
            folded = [
                [piece for line in text.split("\n") for piece in textwrap.wrap(line, wide, **_WORDS) or [""]]
                for (text, _), wide in zip(row, widths, strict=True)
            ]
            height = max(map(len, folded))
            for line in range(height):
                cells = []
                for column, texts in enumerate(folded):
                    at = line if number else line - height + len(texts)  # titles are aligned at the bottom
                    text = texts[at] if 0 <= at < len(texts) else ""
                    cell = _paint(text, row[column][1], colours), " " * (widths[column] - len(text))
                    cells.append("".join(reversed(cell) if column in self.numbers else cell))
                yield _GAP.join(cells).rstrip()

    def _widths(self, texts: list[list[str]], columns: int) -> list[int]:
        """Return each column's width: the column that has the most to spare is narrowed, blank by blank."""
        widths = [max(len(line) for text in column for line in text.split("\n")) for column in texts]
        least = [min(wide, _LEAST) for wide in widths]
        for column in self.numbers:
            title, *cells = texts[column]
            least[column] = max(map(len, [*title.split(), *cells]), default=0)
        while sum(widths) + len(_GAP) * (len(widths) - 1) > columns:
            room = [one - low for one, low in zip(widths, least, strict=True)]
            if max(room) <= 0:
                break
            widths[room.index(max(room))] -= 1
        return widths


Part: TypeAlias = "Table | Cell | list[Cell]"
"""A table, or a line of one cell or several."""


def width() -> int:
    """Return the number of columns: COLUMNS, else the terminal's, else 80."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    with contextlib.suppress(OSError):  # no terminal
        return os.get_terminal_size(screen.out().fileno()).columns or 80
    return 80


def show(parts: Iterable[Part], to: TextIO | None = None) -> None:
    stream = to or screen.out()
    colours = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for part in parts:
        lines = part.lines(width(), colours) if isinstance(part, Table) else [_line(part, colours)]
        stream.writelines(f"{line}\n" for line in lines)
    stream.flush()


def as_text(parts: Iterable[Part]) -> str:
    stream = io.StringIO()
    show(parts, to=stream)
    return stream.getvalue().removesuffix("\n")


def print_json(text: str) -> None:
    screen.out().write(f"{text}\n")
    screen.out().flush()


def wrapped(text: str, columns: int, indent: str = "") -> str:
    """Fold a text between words; a longer word, such as a path, stays whole."""
    how: dict[str, Any] = {"subsequent_indent": indent, "break_long_words": False}
    return "\n".join(textwrap.fill(line, columns, **how, **_WORDS) for line in text.split("\n"))


def _line(part: Cell | list[Cell], colours: bool) -> str:
    """Fold a line and keep its indentation. Blanks become line ends, so each cell keeps its length."""
    cells = [_styled(cell) for cell in (part if isinstance(part, list) else [part])]
    text, found = "".join(cell for cell, _ in cells), ""
    indent = len(text) - len(text.lstrip(" -"))
    text = text[:indent] + wrapped(text[indent:], width() - indent)
    for cell, style in cells:
        found += _paint(text[: len(cell)], style, colours)
        text = text[len(cell) :]
    return found.replace("\n", "\n" + " " * indent)


def _styled(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell


def _paint(text: str, style: str, colours: bool) -> str:
    codes = ";".join(_CODES[word] for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if colours and codes and text else text
