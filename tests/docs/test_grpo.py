"""docs/grpo.md and docs/dev/tried.md: what they say of the published runs is what the files show."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / "grpo.md", ["bfloat16"]), (ROOT / "docs" / "dev" / "tried.md", ["coarse", "fsdp"])]
SHOWN = [(page, name) for page, names in PAGES for name in names]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "grpo" / f"{name}.json").read_text())
    return found


def words(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "name"), SHOWN, ids=[name for _, name in SHOWN])
def test_a_table_is_what_the_example_prints_of_its_file(
    page: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "grpo"))
    monkeypatch.setenv("COLUMNS", "200")
    importlib.import_module("curves").show(result(name))
    tables = re.findall(r"```text\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert capsys.readouterr().out.strip("\n") in tables


@pytest.mark.parametrize(("page", "name"), SHOWN, ids=[name for _, name in SHOWN])
def test_a_file_shows_what_a_run_has_to_and_its_page_how_it_ran(
    page: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    found = result(name)
    assert importlib.import_module("check").grpo(found) == []
    command = found["command"].replace("python examples/grpo/run.py", "bash ci/grpo.sh")
    assert command in words(page) or found["command"] in words(page)
    assert f"{found['seconds']:,} s beside other work" in words(page)
    assert f"commit {found['versions']['commit'][:7]}" in words(page)
