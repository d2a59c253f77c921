"""The signatures on the pages of the API are those of the code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_the_pages_show_how_each_name_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python ci/api_page.py --write` writes them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "ci"))
    api_page = importlib.import_module("api_page")
    assert "RoutedExperts.take(rows)" in api_page.signatures()
    assert "Following.metrics()" in api_page.signatures()
    for page in api_page.PAGES:
        text = page.read_text(encoding="utf-8")
        assert importlib.import_module("pages").rewritten(text, api_page.MARKS, api_page.block()) == text
