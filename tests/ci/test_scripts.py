"""ci/demo.sh, ci/test.sh and what they stand on, run as people run them, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy with what has been fetched here, in a folder whose name has a space in it."""
    copy = tmp_path / "a clone"
    copy.mkdir()
    for folder in ("npu_replay", "compat", "ci", "examples"):
        shutil.copytree(REPOSITORY / folder, copy / folder, True, shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    (copy / ".work").symlink_to(REPOSITORY / ".work")
    return copy


def script(clone: Path, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it from elsewhere, in this environment, with the copy's npu_replay."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(clone), "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", str(clone / "ci" / name), *arguments],
        cwd=clone.parent,
        env=os.environ | given | variables,
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
    done = script(clone, "test.sh", PYTHONPATH="")
    assert done.returncode == 1
    assert "lacks, and is left as it is:\n    npu-replay\nnpu-replay from here: pip install" in done.stderr
    assert f"--no-deps -e {clone}\n" in done.stderr


def test_a_half_made_folder_is_never_taken_for_a_whole_one(clone: Path) -> None:
    (clone / "ci" / "tried.sh").write_text(
        'source "$(dirname "$0")/environment.sh"\n'
        'made() { mkdir "$2"; echo "$1"; return "$1"; }\n'
        'once "$repository/there/it" "a thing" made 0\n'
        'once "$repository/there/it" "a thing" made 7\n'
        'once "$repository/there/other" "another" made 1\n'
    )
    done = script(clone, "tried.sh")
    assert (done.returncode, done.stdout.splitlines()[-4:]) == (
        1,
        ["Fetching a thing ...", "0", "Fetching another ...", "1"],
    )
    assert "could not fetch another" in done.stderr
    assert [one.name for one in (clone / "there").iterdir()] == ["it"]


@pytest.mark.parametrize(("needed", "code", "told"), [("", 5, "1 skipped"), ("1", 2, "1 error")])
def test_a_product_that_is_missing_fails_in_the_script_that_is_there_for_it(
    needed: str, code: int, told: str
) -> None:
    """ROLL stands for all: no registry has it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/on_roll"],
        cwd=REPOSITORY,
        env=os.environ | {"NPU_REPLAY_NEEDED": needed, "PYTHONPATH": ""},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stdout
    assert "not importable: roll.distributed" in done.stdout
    assert "NPU_REPLAY_NEEDED=1" in (REPOSITORY / "ci" / "live.sh").read_text()


@pytest.mark.parametrize(
    ("arguments", "live"),
    [(["--engine", "vllm"], True), (["--engine=vllm"], True), (["--steps", "1"], False)],
)
def test_the_demo_with_vllm_has_the_environment_with_vllm(
    clone: Path, arguments: list[str], live: bool
) -> None:
    with (clone / "ci" / "environment.sh").open("a") as out:
        out.write(
            'live_environment() { echo "the live environment"; }\nwith_megatron() { echo "$2" "${@:3}"; }\n'
        )
    done = script(clone, "demo.sh", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("the live environment" in done.stdout) == live
    assert f"python -m examples.demo {' '.join(arguments)} --out" in done.stdout
    assert "/out/demo --force" in done.stdout, "it can be run again, over what it wrote"
    given = script(clone, "demo.sh", *arguments, "--out", "elsewhere")
    assert given.stdout.count("--out elsewhere") == 1
    assert "--force" not in given.stdout, "what lies elsewhere is somebody's"


@pytest.mark.skipif(
    not (REPOSITORY / ".work" / "megatron" / "0.16.1").is_dir(), reason="ci/environment.sh fetches Megatron"
)
def test_the_tests_end_with_one_line_that_says_how_they_ended(clone: Path) -> None:
    (clone / "tests").mkdir()
    (clone / "tests" / "test_some.py").write_text(
        "import pytest\n\n\ndef test_first():\n    pass\n\n\n"
        "@pytest.mark.megatron\ndef test_second():\n    assert False\n\n\n"
        "def test_third():\n    pytest.skip()\n"
    )
    done = script(clone, "test.sh", "tests/test_some.py")
    assert done.returncode == 1, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    assert last.startswith(
        "FAILED: 1 passed, 1 failed, 1 skipped on Megatron-core 0.12.1; 0 passed, 1 failed"
    ), last
    assert re.search(r" 0\.16\.1; in \d+ s, after \d+ s", last), last
    assert last.endswith("s of setup (downloads included)")
    done = script(clone, "test.sh", "tests/test_some.py", "-k", "not second")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        "passed: 1 passed, 1 skipped on Megatron-core 0.12.1; 0 passed on Megatron-core 0.16.1; in"
    ), last
