"""The table and the lines of all commands."""

from __future__ import annotations

import io
import sys

import pytest

from npu_replay.tables import Part, Table, as_text, show

NUMBERS = [("record", "1.00", "2,000"), ("[bold]", "10.00", "1,234,567")]
TABLE = Table(("What", "x base", "a title of\nmany words"), NUMBERS, numbers=range(1, 3))
PARTS: list[Part] = ["A: /tmp/[red]", TABLE, "", "the same", "[red]is no style"]


@pytest.fixture(autouse=True)
def sixty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


def test_numbers_are_right_aligned_and_words_left(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_words_fold_at_the_width_and_a_number_never(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "one two three four five six seven eight nine ten eleven"
    table = Table(("Why", "Count", "Where"), [(words, "1,234,567", "/a/long/path" * 5)], numbers=range(1, 2))
    monkeypatch.setenv("COLUMNS", "44")
    assert as_text([table]).splitlines() == [
        "Why                  Count  Where",
        "one two three    1,234,567  /a/long/path/a/l",
        "four five six               ong/path/a/long/",
        "seven eight                 path/a/long/path",
        "nine ten eleven             /a/long/path",
    ]


def test_a_line_folds_between_words_and_a_path_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    parts: list[Part] = ["  - refused: rows of layer 3 in /a/very/long/path/to/a-file.npy"]
    assert as_text(parts).splitlines() == [
        "  - refused: rows of",
        "    layer 3 in",
        "    /a/very/long/path/to/a-file.npy",
    ]
