"""The table and the lines of all commands."""

from __future__ import annotations

import io
import sys

import pytest

from npu_replay.tables import Part, Table, as_text, show

NUMBERS = [("record", "1.00", "2,000"), ("[bold]", "10.00", "1,234,567")]
TABLE = Table(("What", "x base", "a title of\nmany words"), NUMBERS, numbers=range(1, 3))
PARTS: list[Part] = ["A: /tmp/[red]", TABLE, "", "the same", "[red]is no style"]


def test_numbers_are_right_aligned_and_words_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    show(PARTS)
    assert stream.getvalue() == as_text(PARTS) + "\n"
    assert as_text(PARTS).splitlines() == [
        "A: /tmp/[red]",
        "                a title of",
        "What    x base  many words",
        "record    1.00       2,000",
        "[bold]   10.00   1,234,567",
        *("", "the same", "[red]is no style"),
    ]


WORDS = "one two three four five six seven eight nine ten eleven"
FOLDED: dict[str, tuple[Part, list[str]]] = {
    # columns, what is shown, and its lines: words fold, a number or a path in a line never
    "44": (
        Table(("Why", "Count", "Where"), [(WORDS, "1,234,567", "/a/long/path" * 5)], numbers=range(1, 2)),
        [
            "Why                  Count  Where",
            "one two three    1,234,567  /a/long/path/a/l",
            "four five six               ong/path/a/long/",
            "seven eight                 path/a/long/path",
            "nine ten eleven             /a/long/path",
        ],
    ),
    "20": (
        "  - refused: rows of layer 3 in /a/very/long/path/to/a-file.npy",
        ["  - refused: rows of", "    layer 3 in", "    /a/very/long/path/to/a-file.npy"],
    ),
}


@pytest.mark.parametrize("columns", FOLDED)
def test_what_is_wider_than_the_screen_is_folded(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    part, lines = FOLDED[columns]
    assert as_text([part]).splitlines() == lines
