"""The tables of the engines' pages are true."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from npu_replay import ReplayError
from npu_replay.compat import vllm

ROOT = Path(__file__).parents[1].parent
DOCS = ROOT / "docs"
TEXT = "\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("vllm", "vllm-ascend"))
RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"


def table(title: str) -> list[list[str]]:
    """The rows of the table with this first heading."""
    lines = TEXT.split(f"\n| {title} |")[1].splitlines()[2:]
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
