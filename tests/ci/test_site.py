"""What is made of the pages: the menu and links of the site, and the signatures in the pages of the API."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci_module import ci_module

ROOT = Path(__file__).parents[2]
api_page = ci_module("api_page")
pages = ci_module("site_pages")
MENU = re.findall(r"(?m)^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def test_the_pages_of_the_api_show_how_each_name_is_called() -> None:
    """`python ci/api_page.py --write` writes them."""
    assert "RoutedExperts.take(rows)" in api_page.signatures()
    for page in api_page.PAGES:
        text = page.read_text(encoding="utf-8")
        assert api_page.pages.rewritten(text, api_page.MARKS, api_page.block()) == text


def test_every_page_is_in_the_menu_once() -> None:
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(MENU) == sorted({*there, *pages.OUTSIDE.values()})


@pytest.mark.parametrize(
    ("page", "link", "in_the_site"),
    [
        ("quickstart.md", "[a](metrics.md#keys)", "[a](metrics.md#keys)"),
        ("zh/quickstart.md", "[a](../metrics.md)", "[a](../metrics.md)"),
        ("index.md", "[a](../README.md#install)", "[a](project/readme.md#install)"),
        ("zh/x.md", "[a](../../CONTRIBUTING.md)", "[a](../project/contributing.md)"),
        ("project/readme.md", "[a](docs/metrics.md)", "[a](../metrics.md)"),
        ("project/readme.md", "![a](docs/images/grpo.png)", "![a](../images/grpo.png)"),
        ("project/readme.md", "[中文](README.zh.md)", "[中文](../zh/index.md)"),
        ("zh/index.md", "[a](docs/metrics.md)", "[a](../metrics.md)"),
        ("grpo.md", "[the loop](../examples/grpo/loop.py)", "[the loop](project/examples/grpo/loop.py.md)"),
        ("grpo.md", "[the tests](../tests/live/test_grpo.py)", "the tests"),
        ("zh/x.md", "[a](../../examples/README.md#verl)", "[a](../project/examples/readme.md#verl)"),
        ("vllm.md", "[a](../examples/multi_turn.py)", "[a](project/examples/multi_turn.py.md)"),
        ("project/examples/readme.md", "[a](verl/npu_fsdp2.sh)", "[a](verl/npu_fsdp2.sh.md)"),
        ("project/examples/readme.md", "[a](../docs/metrics.md)", "[a](../../metrics.md)"),
        ("project/readme.md", "![a](https://img.example.org/a.svg)", ""),  # nothing from another host
        ("grpo.md", "[a](https://example.org/x.md) [b](#c)", "[a](https://example.org/x.md) [b](#c)"),
    ],
)
def test_links_become_those_of_the_site(page: str, link: str, in_the_site: str) -> None:
    known = {"metrics.md", "images/grpo.png", *pages.OUTSIDE.values(), *pages.SHOWN.values()}
    assert pages.relinked(link, page, known) == in_the_site
