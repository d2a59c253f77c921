"""The signatures on the pages of the API are those of the code."""

from __future__ import annotations

from ci_module import ci_module

api_page = ci_module("api_page")


def test_the_pages_show_how_each_name_is_called() -> None:
    """`python ci/api_page.py --write` writes them."""
    assert "RoutedExperts.take(rows)" in api_page.signatures()
    for page in api_page.PAGES:
        text = page.read_text(encoding="utf-8")
        assert api_page.pages.rewritten(text, api_page.MARKS, api_page.block()) == text
