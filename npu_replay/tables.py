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

_GAP = "  "
_WORDS: dict[str, Any] = {"break_on_hyphens": False, "expand_tabs": False}
_LEAST = 10
"""The least width to which a column of words is narrowed."""


@dataclass(frozen=True)
class Table:
    """Holds titles and rows of texts; columns in `numbers` are right-aligned and not folded."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: range = range(0)

    def lines(self, columns: int) -> Iterator[str]:
        """Yield the lines of the table, folded to this number of columns."""
        rows = [self.titles, *self.rows]
        widths = self._widths(list(zip(*rows, strict=True)), columns)
        for number, row in enumerate(rows):
            # Long words are folded, too, so that later columns stay aligned.
            folded = [
                [piece for line in text.split("\n") for piece in textwrap.wrap(line, wide, **_WORDS) or [""]]
                for text, wide in zip(row, widths, strict=True)
            ]
            height = max(map(len, folded))
            for line in range(height):
                cells = []
                for column, texts in enumerate(folded):
                    at = line if number else line - height + len(texts)  # titles are aligned at the bottom
                    text = texts[at] if 0 <= at < len(texts) else ""
                    cells.append((str.rjust if column in self.numbers else str.ljust)(text, widths[column]))
                yield _GAP.join(cells).rstrip()

    def _widths(self, texts: Sequence[Sequence[str]], columns: int) -> list[int]:
        """Return each column's width: the column that has the most to spare is narrowed, blank by blank."""
        widths = [max(len(line) for text in column for line in text.split("\n")) for column in texts]
        least = [min(wide, _LEAST) for wide in widths]
        for column in self.numbers:
            title, *cells = texts[column]
            least[column] = max(map(len, [*title.split(), *cells]), default=0)
        while sum(widths) + len(_GAP) * (len(widths) - 1) > columns:
            room = [width - low for width, low in zip(widths, least, strict=True)]
            if max(room) <= 0:
                break
            widths[room.index(max(room))] -= 1
        return widths


Part: TypeAlias = "Table | str"
"""A table, or a line, which keeps its indentation where it is folded."""


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
