"""What starts vLLM by a command, in a process of its own: examples, the demo, a device's rollout, GRPO."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shown_examples import ROOT, prints_what_it_promises

LIMIT = 400
SAMPLES = [96 + 8 + 12 * number for number in range(32)]
"""The tokens of each prompt of a device's rollout; each gets 128 more, of which the last isn't run."""


@pytest.mark.megatron
def test_r3_from_vllm_to_megatron() -> None:
    prints_what_it_promises(ROOT / "examples" / "vllm_to_megatron_r3.py")


def test_several_turns_with_a_tool() -> None:
    prints_what_it_promises(ROOT / "examples" / "multi_turn.py")


@pytest.mark.long
@pytest.mark.megatron
def test_the_demo_keeps_its_promises_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    command = [sys.executable, "-m", "examples.demo", "--engine", "vllm", "--steps", "2"]
    ended = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Rollout: vLLM 0.30." in ended.stdout
    assert importlib.import_module("check").demo(json.loads((tmp_path / "demo.json").read_text())) == []


def test_a_start_is_decoded_and_counted(saved: Any, tmp_path: Path) -> None:
    model, folder = saved("Qwen3Moe", num_hidden_layers=2)
    out = tmp_path / "first.out"
    command = [
        sys.executable,
        str(ROOT / "ci" / "rollout_device.py"),
        str(folder),
        str(out),
        "--mode",
        "eager",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert (report["vllm_ascend"], report["mode"]) == ("", "eager")
    assert report["layers"] == model.config.num_hidden_layers
    assert report["rows"] == sum(SAMPLES) + 32 * 127


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    small = ["--teach", "5", "--layers", "2", "--out", str(out)]
    command = [sys.executable, "examples/grpo/run.py", *small, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.megatron
@pytest.mark.timeout(2 * LIMIT)
def test_a_step_on_megatron_shows_what_it_has_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    run = start(tmp_path, "--steps", "1", "--arms", "R2", "TIS+R3")
    told, _ = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, told
    result = json.loads((tmp_path / "grpo.json").read_text())
    assert importlib.import_module("check").grpo(result) == []
    for one in result["runs"]:
        assert [row["replay_mismatch"] for row in one["rows"]] == [0]


@pytest.mark.long
@pytest.mark.timeout(3 * LIMIT)
def test_an_engine_killed_in_the_middle_ends_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "grpo"
    rows = tmp_path / "grpo" / "R3-0.jsonl"
    asked = ["--trainer", "fsdp", "--arms", "R3", "--steps", "3", "--road", "answer"]
    cut = start(out, *asked)
    ends = time.monotonic() + LIMIT
    while not (rows.exists() and rows.read_text()) and time.monotonic() < ends and cut.poll() is None:
        time.sleep(0.1)
    for child in psutil.Process(cut.pid).children(recursive=True):
        ended = not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        if not ended and "vllm.entrypoints.openai.api_server" in " ".join(child.cmdline()):
            for process in (*child.children(recursive=True), child):  # its engine would outlive it
                process.kill()
    told, _ = cut.communicate(timeout=LIMIT)
    assert cut.returncode != 0
    assert "the rollout engine gave no answer" in told, told
    assert "The same command goes on" in told
    assert 0 < len(rows.read_text().splitlines()) < 3
    told, _ = start(out, *asked).communicate(timeout=LIMIT)
    result = json.loads((out / "grpo.json").read_text())["runs"][0]["rows"]
    assert [row["step"] for row in result] == [0, 1, 2], f"a step is taken twice, or left out: {told}"
