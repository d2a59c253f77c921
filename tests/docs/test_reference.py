"""What is looked up is complete: every metric, every switch, and what a stack can't do."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import npu_replay
from examples.qwen3_moe.model import qwen3_moe
from npu_replay.compat.verl import metrics
from sessions.test_contract import UNABLE

ROOT = Path(__file__).parents[2]
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for folder in ("npu_replay", "compat")
    for path in (ROOT / folder).rglob("*.py")
}


def section(name: str, title: str) -> str:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def keys(text: str) -> set[str]:
    return set(re.findall(r"(?m)^\| `([\w/]+)` \|", text))


def test_every_metric_of_a_block_is_told() -> None:
    model = qwen3_moe(0, torch.device("cpu")).train()
    batch = torch.randint(0, 512, (2, 9))
    with torch.no_grad(), npu_replay.record(model) as recording:
        model(input_ids=batch)
    with npu_replay.replay(model, recording.routes, live_mismatch=True) as session:
        model(input_ids=batch)
    of_blocks = recording.metrics().keys() | session.metrics().keys()
    assert keys(section("metrics", "Keys of a block")) == of_blocks | {
        "capacity_dropped",  # under a capacity alone
        "overlap",  # of an engine's routes alone
    }
    with npu_replay.follow(model) as following:
        with torch.no_grad():
            model(input_ids=batch)
        model(input_ids=batch).logits.sum().backward()
    assert keys(section("metrics", "Keys of follow")) == following.metrics().keys() - of_blocks


def test_every_metric_of_a_verl_job_is_told() -> None:
    sums = dict.fromkeys(metrics.COUNTED, 1) | {"ranks": 1}
    assert keys(section("metrics", "Keys of a verl job")) == metrics.figures(sums).keys()


def test_every_switch_is_told() -> None:
    """In one table."""
    named = set(re.findall(r"NPU_REPLAY_[A-Z_]+[A-Z]", "".join(SOURCES.values())))
    assert named == set(re.findall(r"NPU_REPLAY_[A-Z_]+[A-Z]", section("metrics", "Switches")))


ROWS = {"follow": "`follow`", "aux loss": '`aux_loss="replayed"`', "capacity": "capacity"}
STACKS = {"megatron": "Megatron", "megatron hybrid": "HybridModel"}
"""By what the page calls them; the others but the toy are transformers'."""


def test_the_page_of_models_has_the_expected_failures_of_every_stack() -> None:
    """Those of the contract."""
    expected: dict[tuple[str, str], list[str]] = {}
    for row, reasons in UNABLE.items():
        for stack, why in reasons.items():
            names = expected.setdefault((ROWS[row], why), [])
            if stack != "toy" and (name := STACKS.get(stack, "transformers")) not in names:
                names.append(name)
    lines = [f"| {row} | {', '.join(names)} | {why} |" for (row, why), names in expected.items() if names]
    table = section("models", "What a stack can't do").splitlines()
    assert [line for line in table if line.startswith("|")][2:] == lines
