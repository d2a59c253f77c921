"""The tables of the engines' pages are true, and so is what inspect shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npu_replay import ReplayError
from npu_replay.compat import sglang, vllm

ROOT = Path(__file__).parents[1].parent
DOCS = ROOT / "docs"
TEXT = "\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("vllm", "vllm-ascend"))
RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"
INSPECT = (DOCS / "cli.md").read_text(encoding="utf-8")


def table(title: str) -> list[list[str]]:
    """The rows of the table with this first heading."""
    lines = iter(TEXT.splitlines())
    for line in lines:
        if line.startswith(f"| {title} |"):
            next(lines)
            break
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    assert found, title
    return found


def test_the_table_of_vllm_is_what_engine_arguments_says() -> None:
    for release, adds, _ in table("release | `engine_arguments` adds"):
        if adds.startswith("refused"):
            with pytest.raises(ReplayError, match="is older than"):
                vllm.engine_arguments(release)
            continue
        found = vllm.engine_arguments(release)
        words = [f"`{name}={value}`" for name, value in found.arguments.items()]
        words += [f"environment `{name}={value}`" for name, value in found.environment.items()]
        assert adds == ", ".join(words), release


def ends_with_data_parallelism(version: str, vllm_ascend: str, ranks: int) -> bool:
    try:
        vllm.engine_arguments(version, vllm_ascend=vllm_ascend, planned={"data_parallel_size": ranks})
    except ReplayError as error:
        return "AssertionError" in str(error)
    return False


def gives_quantized(version: str, vllm_ascend: str) -> bool:
    try:
        vllm.engine_arguments(version, vllm_ascend=vllm_ascend, quantization="ascend")
    except ReplayError as error:
        return "captures no quantized experts" not in str(error)
    return True


def with_the_plug_in(release: str) -> str:
    """What engine_arguments says of a release with capture=True, in the table's words."""
    beside = "0.23.0" if release == "0.13.0" else release.split("rc")[0]
    asked = {"vllm_ascend": release, "quantization": "ascend", "capture": True}
    try:
        made = vllm.engine_arguments(beside, **asked)
    except ReplayError:
        return "refused"
    hybrid = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    hybrid |= {"layer_types": ["linear_attention", "full_attention"]}
    try:
        vllm.engine_arguments(beside, **asked, model=hybrid)
    except ReplayError:
        return "all experts, except in hybrid models"
    return "all experts" + (", with Model Runner V2" if RUNNER_V2 in made.environment else "")


def test_the_table_of_vllm_ascend_is_what_engine_arguments_says() -> None:
    for release, says, captured in table("vllm-ascend"):
        assert captured == with_the_plug_in(release), release
        beside = "0.23.0" if release == "0.13.0" else release.split("rc")[0]
        if says.startswith("refused"):
            words = {
                "refused: older than what is checked": "is older than",
                "refused: every id is 0": "zeros for every",
            }
            with pytest.raises(ReplayError, match=words[says]):
                vllm.engine_arguments(beside, vllm_ascend=release)
            continue
        made = vllm.engine_arguments(beside, vllm_ascend=release)
        for ranks in (1, 2):
            assert ("without data" in says and ranks > 1) == ends_with_data_parallelism(
                beside, release, ranks
            )
        assert ("unquantized experts" in says) == (not gives_quantized(beside, release)), release
        assert ("Model Runner V2" in says) == (RUNNER_V2 in made.environment), release


def test_the_table_of_sglang_is_what_engine_arguments_says() -> None:
    says = dict(table("release | routes"))
    assert list(says) == ["0.5.7", "0.5.8", "0.5.9", "0.5.12", "0.5.13", "0.5.23"]
    with pytest.raises(ReplayError, match="is older than"):
        sglang.engine_arguments("0.5.7")
    with pytest.raises(ReplayError, match="zeros on an NPU"):
        sglang.engine_arguments("0.5.8", device="npu")
    assert sglang.engine_arguments("0.5.9", device="npu").arguments
    assert "routed_experts_start_len" not in sglang.request_arguments("0.5.11", start_len=3)
    assert "routed_experts_start_len" in sglang.request_arguments("0.5.12", start_len=3)
    with pytest.raises(ReplayError, match=r"0\.5\.23"):
        sglang.engine_arguments("0.5.22", planned={"enable_eplb": True}, device="npu")
    assert sglang.engine_arguments("0.5.23", planned={"enable_eplb": True}, device="npu").arguments


@pytest.mark.slow
def test_the_output_of_inspect_is_what_it_says(tmp_path: Path) -> None:
    """All but the figures, which may differ from processor to processor."""
    shown = re.findall(r"```text\n((?:answer|damaged)\.json:.*?)```", INSPECT, re.DOTALL)
    assert len(shown) == 2
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "draw_inspect.py"), str(tmp_path), str(tmp_path / "picture.png")],
        env=os.environ | {"COLUMNS": "110", "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

    def words(text: str) -> list[list[str]]:
        """Of each line; of a layer's nothing, since the page leaves some out, and no fingerprint."""
        found = [
            line.split()
            for line in text.splitlines()
            if not re.match(r"fingerprint|\.{3}$|\d+ .*\(expert", line)
        ]
        return [line for line in found if line]

    assert words(done.stdout) == words("".join(shown))
    layers = [set(re.findall(r"(?m)^(\d+) .*\(expert", text)) for text in (done.stdout, shown[0])]
    assert layers[0] > layers[1] >= {"1", "11"}
