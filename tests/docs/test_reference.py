"""What is looked up is complete and true: metrics, switches, what a stack can't do, the tables of engines."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch

import npu_replay
from examples.qwen3_moe.model import qwen3_moe
from npu_replay import ReplayError
from npu_replay.compat import vllm
from npu_replay.compat.verl import metrics
from sessions.test_contract import UNABLE

ROOT = Path(__file__).parents[2]
SOURCES = {
    path: path.read_text(encoding="utf-8")
    for folder in ("npu_replay", "compat")
    for path in (ROOT / folder).rglob("*.py")
}


def page_of(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    return page_of(name).split(f"## {title}\n")[1].split("\n## ")[0]


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


# The tables of the engines' pages

ENGINES = "\n".join(page_of(name) for name in ("vllm", "vllm-ascend"))
RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"


def table(title: str) -> list[list[str]]:
    """The rows of the table with this first heading."""
    lines = ENGINES.split(f"\n| {title} |")[1].splitlines()[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def refusal(version: str, **arguments: Any) -> str:
    """Why engine_arguments refuses these; empty where it doesn't."""
    try:
        vllm.engine_arguments(version, **arguments)
    except ReplayError as error:
        return str(error)
    return ""


def test_the_table_of_vllm_is_what_engine_arguments_says() -> None:
    for release, adds, _ in table("release | `engine_arguments` adds"):
        assert adds.startswith("refused") == ("is older than" in refusal(release))
        if not adds.startswith("refused"):
            found = vllm.engine_arguments(release)
            words = [f"`{name}={value}`" for name, value in found.arguments.items()]
            words += [f"environment `{name}={value}`" for name, value in found.environment.items()]
            assert adds == ", ".join(words), release


HYBRID = {
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
OLD = {"refused: older than what is checked": "is older than", "refused: every id is 0": "zeros for every"}


def with_the_plug_in(beside: str, **asked: Any) -> str:
    """What engine_arguments says of a release with capture=True, in the table's words."""
    if refusal(beside, **asked):
        return "refused"
    if refusal(beside, **asked, model=HYBRID):
        return "all experts, except in hybrid models"
    environment = vllm.engine_arguments(beside, **asked).environment
    return "all experts" + (", with Model Runner V2" if RUNNER_V2 in environment else "")


def test_the_table_of_vllm_ascend_is_what_engine_arguments_says() -> None:
    for release, says, captured in table("vllm-ascend"):
        beside = "0.23.0" if release == "0.13.0" else release.split("rc")[0]
        asked = {"vllm_ascend": release, "quantization": "ascend"}
        assert captured == with_the_plug_in(beside, **asked, capture=True), release
        if says.startswith("refused"):
            assert OLD[says] in refusal(beside, vllm_ascend=release)
            continue
        made = vllm.engine_arguments(beside, vllm_ascend=release)
        several = refusal(beside, vllm_ascend=release, planned={"data_parallel_size": 2})
        assert ("without data" in says) == ("AssertionError" in several)
        quantized = "captures no quantized experts" not in refusal(beside, **asked)
        assert ("unquantized experts" in says) == (not quantized), release
        assert ("Model Runner V2" in says) == (RUNNER_V2 in made.environment), release


def test_the_table_of_sglang_has_the_releases_in_which_something_changes() -> None:
    """What changes in each: tests/compat/sglang."""
    shown = [release for release, _ in table("release | routes")]
    assert shown == ["0.5.7", "0.5.8", "0.5.9", "0.5.12", "0.5.13", "0.5.23"]
