"""The pages in Chinese say the same as those in English: commands, code, tables and versions are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = [(ROOT / "README.md", ROOT / "README.zh.md")]
PAIRS += [(ROOT / "docs" / page.name, page) for page in sorted((ROOT / "docs" / "zh").glob("*.md"))]
SECTIONS = {
    "mindspeed.md": ("upstream.md", "MindSpeed on Ascend"),
    "smoke.md": ("versions.md", "npu-replay smoke"),
}
"""Pages in Chinese that are a section of an English page."""
BOTH = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[chinese.stem for _, chinese in PAIRS])
FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)+(?:\.?rc\d+)?(?!\w)|\d+(?:\.\d+)?(?:e-\d+| %)")
WHOLE = re.compile(r"(?<![\w.])\d{2,}(?!\w|\.\d| 万)")
"""Small numbers may be words; 500 万 are 5 million."""


def read(page: Path) -> str:
    """The page's text, or that of its section, whose headings are one level higher then."""
    if page.exists() or page.name not in SECTIONS:
        return page.read_text(encoding="utf-8")
    name, title = SECTIONS[page.name]
    text = page.with_name(name).read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.sub("(?m)^#(?=#)", "", f"## {title}\n{section}\n")


def blocks(text: str) -> list[tuple[str, str]]:
    """Kind and text of each; comments are told in each language's own words."""
    return [(kind, re.sub(r" +#(?= )[^\n]*", "", body)) for kind, body in FENCE.findall(text)]


def rows(text: str) -> list[tuple[int, list[str], list[str]]]:
    """Of each row of a table: how many cells, what stands in it as code, and its numbers."""
    lines = [line for line in FENCE.sub("", text).splitlines() if line.startswith("|")]
    return [
        (line.count("|"), sorted(re.findall(r"`[^`]+`", line)), sorted(NUMBER.findall(line)))
        for line in lines
    ]


@BOTH
def test_there_is_a_page_of_each_name(english: Path, chinese: Path) -> None:
    assert read(english)
    assert re.search(r"[\u4e00-\u9fff]", read(chinese))


@BOTH
def test_code_is_equal(english: Path, chinese: Path) -> None:
    assert blocks(read(chinese)) == blocks(read(english))


@BOTH
def test_tables_have_the_same_rows_commands_and_numbers(english: Path, chinese: Path) -> None:
    theirs, ours = rows(read(english)), rows(read(chinese))
    assert len(ours) == len(theirs)
    for there, here in zip(theirs, ours, strict=True):
        assert here == there


@BOTH
def test_words_around_them_name_the_same_code_and_versions(english: Path, chinese: Path) -> None:
    said = [FENCE.sub("", read(page)) for page in (english, chinese)]
    for what in (r"`[^`\n]+`", NUMBER.pattern, r"(?m)^#+(?= )"):
        there, here = (sorted(re.findall(what, text)) for text in said)
        assert here == there


@BOTH
def test_words_around_them_have_the_same_whole_numbers(english: Path, chinese: Path) -> None:
    there, here = (
        re.sub(r"`[^`\n]+`|\]\([^)]*\)", "", FENCE.sub("", read(page))) for page in (english, chinese)
    )
    assert sorted(WHOLE.findall(here)) == sorted(WHOLE.findall(there))


def test_the_pages_that_were_promised_are_there() -> None:
    names = {chinese.name for _, chinese in PAIRS}
    assert names >= {
        "README.zh.md",
        "quickstart.md",
        "verl-ascend.md",
        "vllm-ascend.md",
        "fsdp2.md",
        "troubleshooting.md",
        "megatron.md",
        "mindspeed.md",
        "metrics.md",
        "smoke.md",
    }
