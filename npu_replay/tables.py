"""Print the output of all commands: tables and lines, folded to the terminal's width, or to 80 columns."""

from __future__ import annotations

import io
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias

from npu_replay import screen

_GAP = "  "
_WORDS: dict[str, Any] = {"break_on_hyphens": False, "expand_tabs": False}
_LEAST = 10
"""The least width to which a column of words is folded."""


@dataclass(frozen=True)
class Table:
    """Holds titles and rows of texts; columns in `numbers` are right-aligned. Only the last one is folded."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: range = range(0)

    def lines(self, columns: int) -> Iterator[str]:
        """Yield the lines of the table; a last column of words is folded to fit this number of columns."""
        table = [[text.split("\n") for text in row] for row in (self.titles, *self.rows)]
        widths = [max(len(line) for cell in column for line in cell) for column in zip(*table, strict=True)]
        last = len(widths) - 1
        if last not in self.numbers:
            room = max(_LEAST, columns - sum(widths[:last]) - len(_GAP) * last)
            for row in table:
                row[last] = [
                    part for line in row[last] for part in textwrap.wrap(line, room, **_WORDS) or [""]
                ]
        height = max(map(len, table[0]))
        table[0] = [[""] * (height - len(title)) + title for title in table[0]]  # aligned at the bottom
        for row in table:
            for texts in itertools.zip_longest(*row, fillvalue=""):
                cells = [
                    (str.rjust if column in self.numbers else str.ljust)(text, width)
                    for column, (text, width) in enumerate(zip(texts, widths, strict=True))
                ]
                yield _GAP.join(cells).rstrip()


Part: TypeAlias = "Table | str"
"""A table, or a line, which keeps its indentation where it is folded."""


def width() -> int:
    """Return the number of columns: COLUMNS, else the terminal's, else 80."""
    return shutil.get_terminal_size().columns


def show(parts: Iterable[Part], to: TextIO | None = None) -> None:
    stream = to or screen.out()
    for part in parts:
        if isinstance(part, Table):
            lines = part.lines(width())
        else:
            indent = len(part) - len(part.lstrip(" -"))
            words = wrapped(part[indent:], width() - indent)
            lines = iter([part[:indent] + words.replace("\n", "\n" + " " * indent)])
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
