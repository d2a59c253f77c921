"""What a user copies, with a live vLLM: README's R3, examples, the demo, a device's rollout, GRPO."""

from __future__ import annotations

import json
import logging
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm

import live.rotary  # noqa: F401 - before vLLM builds a model
import npu_replay
from ci_module import ci_module
from live import engine
from live.held import assert_right
from shown_examples import ROOT, prints_what_it_promises

GRPO = ROOT / "examples" / "grpo"
SAMPLES = [96 + 8 + 12 * number for number in range(32)]
"""The tokens of each prompt of a device's rollout; each gets 128 more, of which the last isn't run."""


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script in this process, where vLLM is imported already; what it prints."""

    def run(file: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(file), *arguments])
        monkeypatch.syspath_prepend(str(file.parent))
        runpy.run_path(str(file), run_name="__main__")
        return capfd.readouterr().out

    return run


def test_several_turns_with_a_tool() -> None:
    """In a process of its own: behind two engines in this one README's model took other experts."""
    prints_what_it_promises(ROOT / "examples" / "multi_turn.py")


@pytest.mark.megatron
def test_r3_from_vllm_to_megatron() -> None:
    prints_what_it_promises(ROOT / "examples" / "vllm_to_megatron_r3.py")


def test_readmes_r3_replays_what_the_engine_used(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands: text in, routes out, replayed by transformers. Its model has more experts than a byte can
    name (T19)."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = (block for block in blocks if "from vllm import" in block)
    _, folder = saved("Qwen3Moe", num_experts=300, num_hidden_layers=4, num_experts_per_tok=8)
    shutil.copytree(folder, tmp_path / "Qwen3-30B-A3B")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, **engine.SMALL))
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    model = names["model"]
    tokens = names["tokens"]
    routes = names["routes"]
    assert len(routes) > 6
    assert routes.ids.max() > 255
    assert_right(model, tokens[0], routes)
    assert (names["ratio"] == 1).all(), "both passes are replayed"
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    with torch.no_grad(), npu_replay.record(model) as own:
        model(tokens)
    assert npu_replay.compare([routes], own.routes).router_mismatch < 0.05, "the same weights, in float32"


@pytest.mark.long
@pytest.mark.megatron
def test_the_demo_keeps_its_promises_with_vllm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--engine", "vllm", "--steps", "2"]
    ended = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Rollout: vLLM 0.30." in ended.stdout
    assert ci_module("check").demo(json.loads((tmp_path / "demo.json").read_text())) == []


def test_a_start_is_decoded_and_counted(saved: Any, tmp_path: Path, printed: Callable[..., str]) -> None:
    model, folder = saved("Qwen3Moe", num_hidden_layers=2)
    out = tmp_path / "first.out"
    with pytest.raises(SystemExit) as ended:
        printed(ROOT / "ci" / "rollout_device.py", str(folder), str(out), "--mode", "eager")
    assert ended.value.code == 0
    report = json.loads(out.read_text())
    assert (report["vllm_ascend"], report["mode"]) == ("", "eager")
    assert report["layers"] == model.config.num_hidden_layers
    assert report["rows"] == sum(SAMPLES) + 32 * 127


@pytest.fixture
def jobs_in_this_process(printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's own scripts run here, and not each in a process that imports vLLM and Megatron."""
    start_process = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if Path(command[1]).parent != GRPO:  # vLLM starts processes of its own
            return start_process(command, **options)
        printed(Path(command[1]), *command[2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    yield
    logging.disable(logging.NOTSET)
    for file in GRPO.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.megatron
@pytest.mark.timeout(800)
@pytest.mark.usefixtures("jobs_in_this_process")
def test_a_step_on_megatron_shows_what_it_has_to(tmp_path: Path, printed: Callable[..., str]) -> None:
    small = ["--teach", "5", "--layers", "2", "--steps", "1", "--jobs", "1", "--out", str(tmp_path)]
    printed(GRPO / "run.py", *small, "--arms", "R2", "TIS+R3")
    result = json.loads((tmp_path / "grpo.json").read_text())
    assert ci_module("check").grpo(result) == []
    for run in result["runs"]:
        assert [row["replay_mismatch"] for row in run["rows"]] == [0]
