"""ci/demo.sh, ci/test.sh and what they stand on, run as people run them, in a copy; and ci/stages.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import needed

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the scripts, in a folder whose name has a space in it."""
    copy = tmp_path / "a clone"
    shutil.copytree(REPOSITORY / "ci", copy / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    return copy


def script(clone: Path, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it from elsewhere, in this environment, without the copy's npu_replay."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": "", "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", str(clone / "ci" / name), *arguments],
        cwd=clone.parent,
        env=os.environ | environment | variables,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("answer", ["exit 127", 'exec "$REAL" -c "raise SystemExit(1)"'], ids=["shim", "old"])
def test_without_a_python_that_will_do_it_says_which_one_it_needs(
    clone: Path, tmp_path: Path, answer: str
) -> None:
    for name in ("python3.11", "python3", "python3.12"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = script(clone, "demo.sh", VIRTUAL_ENV="", CONDA_PREFIX="", PATH=path, REAL=sys.executable)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert not (clone / ".venv").exists()


def test_an_active_environment_is_told_what_it_lacks(clone: Path) -> None:
    done = script(clone, "test.sh")
    assert done.returncode == 1
    assert "lacks, and is left as it is:\n    npu-replay\nnpu-replay from here: pip install" in done.stderr
    assert f"--no-deps -e {clone}\n" in done.stderr


@pytest.mark.parametrize(
    ("variable", "outcome"), [("", pytest.skip.Exception), ("1", pytest.Collector.CollectError)]
)
def test_a_product_that_is_missing_fails_in_the_script_that_is_there_for_it(
    variable: str,
    outcome: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """And elsewhere its file is skipped, with the same reason."""
    monkeypatch.setenv("NPU_REPLAY_NEEDED", variable)
    collect, _ = needed.hooks(__file__, ["json", "roll.distributed"], "A cure", "roll")
    either = (pytest.skip.Exception, pytest.Collector.CollectError)  # else a skip would skip this test
    with pytest.raises(either, match=r"^not importable: roll\.distributed\. A cure$") as caught:
        collect(Path(__file__), request.session).collect()
    assert caught.type is outcome
    there, _ = needed.hooks(__file__, ["json"], "A cure", "roll")
    assert there(Path(__file__), request.session) is None
    assert "NPU_REPLAY_NEEDED=1" in (REPOSITORY / "ci" / "live.sh").read_text()


def stages(text: str, table: Path) -> tuple[int, str]:
    command = [sys.executable, str(REPOSITORY / "ci" / "stages.py"), str(table)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_stage_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    table = tmp_path / "new" / "table.md"
    code, printed = stages("bad  echo why; false | true\ngood  echo $NPU_REPLAY_WORKERS\n", table)
    assert code == 1
    assert re.search(r"== bad: FAILED \(1\), \d+ s\nwhy\n", printed)
    assert re.search(r"== good: passed, \d+ s\n1\n", printed)
    assert re.search(r"\| bad \| \d+ \| FAILED \(1\) \|\n", table.read_text(encoding="utf-8"))
    assert stages("one  true\ntwo  true\n", table)[0] == 0
