"""The demo with a live engine, in a process of its own, since vLLM and Megatron both set torch up."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.megatron
def test_the_demo_keeps_its_promises_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    command = [sys.executable, "-m", "examples.demo", "--engine", "vllm", "--steps", "2"]
    ended = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Rollout: vLLM 0.30." in ended.stdout
    check = importlib.import_module("check").demo
    assert check(json.loads((tmp_path / "demo.json").read_text())) == []
