"""ci/stages.py runs the stages of .ci/run, and what the scripts of these need is fetched before."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ci" / "stages.py"


@pytest.fixture(scope="module")
def stages() -> Any:
    spec = importlib.util.spec_from_file_location("stages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stages"] = module
    spec.loader.exec_module(module)
    return module


def run(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_a_stage_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    table = tmp_path / "new" / "table.md"
    done = run("bad  echo why; false | true\ngood  echo $NPU_REPLAY_WORKERS\n", "--table", str(table))
    assert done.returncode == 1
    assert "== bad: FAILED (1)" in done.stdout
    assert "\nwhy\n" in done.stdout
    assert "== good: passed" in done.stdout
    assert "\n1\n" in done.stdout
    assert re.search(r"\| bad \| \d+ \| FAILED \(1\) \|\n", table.read_text(encoding="utf-8"))


def test_stages_that_pass_end_well() -> None:
    assert run("one  true\ntwo  true\n", "--lanes", "1").returncode == 0


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
