"""The pages in Chinese say the same as those in English: commands, code, tables and versions are equal."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = [(ROOT / f"{name}.md", ROOT / f"{name}.zh.md") for name in ("README", "SECURITY", "examples/README")]
PAIRS += [(ROOT / "docs" / page.name, page) for page in sorted((ROOT / "docs" / "zh").glob("*.md"))]
SECTIONS = {
    "smoke.md": ("versions.md", "npu-replay smoke"),
    "glossary.md": ("index.md", "Glossary"),
}
"""Pages in Chinese that are a section of an English page."""
UP_TO = {ROOT / "docs" / "versions.md": "\n## npu-replay smoke\n"}
"""Of an English page, where its Chinese part ends: the rest is another page, or what machines sent."""
NAMES = [str(chinese.relative_to(ROOT)) for _, chinese in PAIRS]
BOTH = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=NAMES)
FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)+(?:\.?rc\d+)?(?!\w)|\d+(?:\.\d+)?(?:e-\d+|%)")
WHOLE = re.compile(r"(?<![\w.])\d{2,}(?!\w|\.\d| 万)")
"""Small numbers may be words; 500 万 are 5 million."""


def read(page: Path) -> str:
    """The page's text, or that of its section, whose headings are one level higher then."""
    if page.exists() or page.name not in SECTIONS:
        text = page.read_text(encoding="utf-8").split(UP_TO.get(page, "\0"))[0]
        text = re.sub(r"(\d+) to (\d+) %", r"\1 % to \2 %", text)
        return re.sub(r"(?<=\d) %", "%", text)  # Chinese has no blank there
    name, title = SECTIONS[page.name]
    text = page.with_name(name).read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.sub("(?m)^#(?=#)", "", f"## {title}\n{section}\n")


def blocks(text: str) -> list[tuple[str, str]]:
    """Kind and text of each; comments are told in each language's own words."""
    return [(kind, re.sub(r"(?m)(^| +)#(?= )[^\n]*", "", body)) for kind, body in FENCE.findall(text)]


def rows(text: str) -> list[tuple[int, list[str], list[str]]]:
    """Of each row of a table: how many cells, what stands in it as code, and its numbers."""
    return [
        (line.count("|"), sorted(re.findall(r"`[^`]+`", line)), sorted(NUMBER.findall(line)))
        for line in FENCE.sub("", text).splitlines()
        if line.startswith("|")
    ]


@BOTH
def test_both_have_the_same_code_tables_versions_and_numbers(english: Path, chinese: Path) -> None:
    there = read(english)
    here = read(chinese)
    assert re.search(r"[\u4e00-\u9fff]", here)
    assert blocks(here) == blocks(there)
    for ours, theirs in zip_longest(rows(here), rows(there)):
        assert ours == theirs
    there, here = FENCE.sub("", there), FENCE.sub("", here)
    for what in (r"`[^`\n]+`", NUMBER.pattern, r"(?m)^#+(?= )"):
        assert sorted(re.findall(what, here)) == sorted(re.findall(what, there))
    there, here = (re.sub(r"`[^`\n]+`|\]\([^)]*\)", "", text) for text in (there, here))
    assert sorted(WHOLE.findall(here)) == sorted(WHOLE.findall(there))
