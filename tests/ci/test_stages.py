"""ci/stages.py runs the stages of .ci/run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
