"""What the scripts write into pages of docs/: tables, each between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; what somebody else wrote can't end a cell or a row."""
    return "\n".join([line(titles), "|---" * len(titles) + "|", *map(line, rows)])


def line(cells: Sequence[str]) -> str:
    """One row of a table."""
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def rewritten(page: str, marks: tuple[str, str], text: str) -> str:
    """The page with this between its marks."""
    head, rest = page.split(marks[0])
    _, tail = rest.split(marks[1])
    return f"{head}{marks[0]}\n\n{text}\n\n{marks[1]}{tail}"


def rewrite(page: Path, marks: tuple[str, str], text: str) -> None:
    """Put this between the marks of a page."""
    page.write_text(rewritten(page.read_text(encoding="utf-8"), marks, text), encoding="utf-8")
