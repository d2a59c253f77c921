"""ci/stages.py runs the stages of .ci/run, and what the scripts of these need is fetched before."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stages() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "ci"))
        return importlib.import_module("stages")


def run(text: str, table: Path) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "ci" / "stages.py"), str(table)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_stage_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    table = tmp_path / "new" / "table.md"
    code, said = run("bad  echo why; false | true\ngood  echo $NPU_REPLAY_WORKERS\n", table)
    assert code == 1
    assert re.search(r"== bad: FAILED \(1\), \d+ s\nwhy\n", said)
    assert re.search(r"== good: passed, \d+ s\n1\n", said)
    assert re.search(r"\| bad \| \d+ \| FAILED \(1\) \|\n", table.read_text(encoding="utf-8"))
    assert run("one  true\ntwo  true\n", table)[0] == 0


def test_a_line_without_a_command_is_an_error(stages: Any) -> None:
    with pytest.raises(ValueError, match="'verl'"):
        stages.read(["verl"])
    assert doctest.testmod(stages).failed == 0


def test_what_the_stages_need_is_fetched_before_them() -> None:
    text = (ROOT / ".ci/run").read_text(encoding="utf-8")
    scripts = set(re.findall(r"ci/(\w+)\.sh", text.partition("<<STAGES")[2]))
    fetching = {
        name for name in scripts if "\nfetched\n" in (ROOT / f"ci/{name}.sh").read_text(encoding="utf-8")
    }
    assert scripts - fetching == {"test", "demo"}, "ci/environment.sh has fetched what they need"
    for name in fetching:
        assert f'"{name}.sh' in text
