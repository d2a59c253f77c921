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
    # columns, what is shown, and its lines: a last column of words folds, and a line
    "44": (
        Table(("Count", "Why"), [("1,234,567", WORDS), ("1", "/a/long/path" * 3)], numbers=range(1)),
        [
            "    Count  Why",
            "1,234,567  one two three four five six seven",
            "           eight nine ten eleven",
            "        1  /a/long/path/a/long/path/a/long/p",
            "           ath",
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
