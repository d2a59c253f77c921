"""The table and the console of all commands."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from npu_replay import tables
from npu_replay.tables import Table, as_text, show, terminal

TABLE = Table(
    ("What", "x base"), [("a", "1.00"), (), ("[bold]", ("10.00", "red"))], numbers=range(1, 2), ruled=True
)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(tables, "terminal", lambda: Console(width=40, file=file))
    return file


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip(" ─")]


def test_rich_and_plain_text_say_the_same(shown: io.StringIO) -> None:
    parts = [[("A: ", "bold"), "/tmp/[red]"], TABLE, "", ("the same", "green"), "[red]is no style"]
    show(parts)
    assert lines(shown.getvalue()) == lines(as_text(parts))
    assert lines(as_text(parts)) == [
        *("A: /tmp/[red]", "What    x base", "a         1.00", "[bold]   10.00"),
        *("the same", "[red]is no style"),
    ]


def test_a_long_word_is_folded_before_a_number(shown: io.StringIO) -> None:
    show([Table(("Where", "Count"), [("/a/long/path" * 5, "1,234,567")], numbers=range(1, 2))])
    text = shown.getvalue()
    assert "1,234,567" in text
    assert "".join(line.split()[0] for line in lines(text)[1:]) == "/a/long/path" * 5


def test_an_empty_row_is_a_gap(shown: io.StringIO) -> None:
    show([TABLE])
    rows = [line.strip() for line in shown.getvalue().splitlines()]
    assert rows[rows.index("[bold]   10.00") - 1] == ""


def test_a_log_is_wider_than_an_unknown_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal().width == 110
    monkeypatch.setenv("COLUMNS", "90")
    assert terminal().width == 90
