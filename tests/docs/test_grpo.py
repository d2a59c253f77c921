"""docs/grpo.md and docs/dev/tried.md: their tables of the published runs are what the files show."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / "grpo.md", ["bfloat16"]), (ROOT / "docs" / "dev" / "tried.md", ["coarse", "fsdp"])]
SHOWN = [(page, name) for page, names in PAGES for name in names]


@pytest.mark.parametrize(("page", "name"), SHOWN, ids=[name for _, name in SHOWN])
def test_a_table_is_what_the_example_prints_of_its_file(
    page: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "grpo"))
    monkeypatch.setenv("COLUMNS", "200")
    importlib.import_module("curves").show(json.loads((ROOT / "docs" / "grpo" / f"{name}.json").read_text()))
    tables = re.findall(r"```text\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert capsys.readouterr().out.strip("\n") in tables
