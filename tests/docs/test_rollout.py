"""docs/rollout.md: its examples run, against servers that answer as the engines do; its tables are true."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import npu_replay
from npu_replay import ReplayError, RoutedExperts
from npu_replay.compat import sglang, vllm
from npu_replay.demo.rollout import qwen3_moe

ROOT = Path(__file__).parents[1].parent
TEXT = (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SAMPLED = 24


class Engine:
    """A small Qwen3-MoE that says which experts it used, as an engine would: none for the last token."""

    def __init__(self) -> None:
        self.model = qwen3_moe(
            0,
            torch.device("cpu"),
            num_hidden_layers=8,
            mlp_only_layers=[0],
            max_position_embeddings=256,
        )

    def run(self, prompt: list[int]) -> tuple[list[int], np.ndarray[Any, Any]]:
        """Tokens that it «samples», and [tokens - 1, layers, top-k]."""
        sampled = [(sum(prompt) + 31 * number) % 512 for number in range(SAMPLED)]
        with torch.inference_mode(), npu_replay.record(self.model) as recording:
            self.model(torch.tensor([prompt + sampled]))
        (routes,) = recording.routes
        rows = np.zeros((len(prompt) + SAMPLED - 1, 8, routes.topk), np.uint8)
        rows[:, list(routes.layers)] = routes.ids.numpy()[:-1]
        return sampled, rows

    def completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        """vLLM's /v1/completions."""
        sampled, rows = self.run(asked["prompt"])
        buffer = io.BytesIO()
        np.save(buffer, rows)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None}
        if asked.get("return_token_ids"):
            choice |= {"prompt_token_ids": asked["prompt"], "token_ids": sampled}
        return {
            "id": "cmpl-1",
            "choices": [choice | {"routed_experts": base64.b64encode(buffer.getvalue()).decode()}],
        }

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        """SGLang's /generate."""
        sampled, rows = self.run(asked["input_ids"])
        info = {
            "id": "1",
            "finish_reason": {"type": "length", "length": SAMPLED},
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": SAMPLED,
        }
        if asked.get("return_routed_experts"):
            info["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return {"text": "", "output_ids": sampled, "meta_info": info}

    def in_process(self, prompts: list[dict[str, Any]]) -> list[Any]:
        """LLM.generate of vLLM."""
        found = []
        for prompt in prompts:
            sampled, rows = self.run(prompt["prompt_token_ids"])
            rows.flags.writeable = False  # as vLLM's are
            one = SimpleNamespace(
                index=0, token_ids=sampled, routed_experts=rows, finish_reason="length", stop_reason=None
            )
            found.append(
                SimpleNamespace(
                    request_id="0", prompt_token_ids=prompt["prompt_token_ids"], outputs=[one], finished=True
                )
            )
        return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture
def server(engine: Engine) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers = {"/v1/completions": engine.completions, "/generate": engine.generate}
            body = json.dumps(answers[self.path](asked)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_the_examples_run_one_after_the_other(
    engine: Engine, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine.model.config.save_pretrained(tmp_path)
    names: dict[str, Any] = {
        "llm": SimpleNamespace(generate=engine.in_process),
        "prompt": [(17 * number) % 512 for number in range(70)],
        "tool_tokens": [5, 6, 7],
        "vllm_server": server,
        "sglang_server": server,
    }
    expected: list[np.ndarray[Any, Any]] = []
    for block in BLOCKS:
        exec(compile(block, "docs/rollout.md", "exec"), names)
        routes = names.get("routes")
        if isinstance(routes, RoutedExperts) and not expected:
            _, rows = engine.run(names["prompt"])
            expected.append(rows)
            assert np.array_equal(routes.ids.numpy()[:-1], rows[:, 1:])
            assert routes.layers == tuple(range(1, 8))
    assert len(BLOCKS) >= 7
    rollout = names["rollout"]
    assert len(rollout) == 70 + SAMPLED + 3 + SAMPLED
    assert rollout.turns == 2
    assert rollout.weight_versions == [None] * (70 + SAMPLED - 1) + [8] * (1 + 3 + SAMPLED - 1) + [None]
    assert names["rows"].recorded.sum() == len(rollout) - 1


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
    assert TEXT.index("| release | `engine_arguments` adds |") < TEXT.index("| release | routes |")
    for release, adds, _ in table("release | `engine_arguments` adds"):
        if adds.startswith("refused"):
            with pytest.raises(ReplayError, match="zeros for every id"):
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


def with_the_plug_in(release: str) -> str:
    """What engine_arguments says of a release with capture=True, in the table's words."""
    beside = "0.23.0" if release == "0.13.0" else release.split("rc")[0]
    asked = {"vllm_ascend": release, "quantization": "ascend", "capture": True}
    try:
        limits = " ".join(vllm.engine_arguments(beside, **asked).limits)
    except ReplayError:
        return "refused"
    hybrid = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    hybrid |= {"layer_types": ["linear_attention", "full_attention"]}
    try:
        vllm.engine_arguments(beside, **asked, model=hybrid)
    except ReplayError:
        return "all experts, except in hybrid models"
    return "all experts" + (", with Model Runner V2" if "Model Runner V2 alone" in limits else "")


def test_the_table_of_vllm_ascend_is_what_engine_arguments_says() -> None:
    for release, says, captured in table("vllm-ascend"):
        assert captured == with_the_plug_in(release), release
        beside = "0.23.0" if release == "0.13.0" else release.split("rc")[0]
        if says.startswith("refused"):
            words = {
                "refused: knows no routes": "knows no routes",
                "refused: every id is 0": "zeros for every",
            }
            with pytest.raises(ReplayError, match=words[says]):
                vllm.engine_arguments(beside, vllm_ascend=release)
            continue
        limits = " ".join(vllm.engine_arguments(beside, vllm_ascend=release).limits)
        for ranks in (1, 2):
            assert ("without data" in says and ranks > 1) == ends_with_data_parallelism(
                beside, release, ranks
            )
        assert ("unquantized experts" in says) == ("unquantized experts alone" in limits), release
        assert ("Model Runner V2" in says) == ("Model Runner V2 alone" in limits), release


def test_the_table_of_sglang_is_what_engine_arguments_says() -> None:
    says = dict(table("release | routes"))
    assert list(says) == ["0.5.6", "0.5.7", "0.5.9", "0.5.12", "0.5.13", "0.5.23"]
    with pytest.raises(ReplayError, match="can't return routes"):
        sglang.engine_arguments("0.5.6")
    with pytest.raises(ReplayError, match="zeros on an NPU"):
        sglang.engine_arguments("0.5.8", device="npu")
    assert sglang.engine_arguments("0.5.9", device="npu").arguments
    assert "OpenAI endpoints have them from 0.5.9" in " ".join(sglang.engine_arguments("0.5.8").limits)
    assert "routed_experts_start_len" not in sglang.request_arguments("0.5.11", start_len=3)
    assert "routed_experts_start_len" in sglang.request_arguments("0.5.12", start_len=3)
    for release, all_must_ask in (("0.5.12", True), ("0.5.13", False)):
        limits = " ".join(sglang.engine_arguments(release).limits)
        assert ("all requests of the server must ask" in limits) == all_must_ask
    with pytest.raises(ReplayError, match=r"0\.5\.23"):
        sglang.engine_arguments("0.5.22", planned={"enable_eplb": True}, device="npu")
    assert sglang.engine_arguments("0.5.23", planned={"enable_eplb": True}, device="npu").arguments


@pytest.mark.slow
def test_the_output_of_inspect_is_what_it_says(tmp_path: Path) -> None:
    """All but the figures, which may differ from processor to processor."""
    shown = re.search(r"```text\nanswer\.json:.*?```", TEXT, re.DOTALL)
    assert shown is not None
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "draw_inspect.py"), str(tmp_path), str(tmp_path / "picture.png")],
        env=os.environ | {"COLUMNS": "110"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

    def words(text: str) -> list[list[str]]:
        """Of each line; of a layer's only its number and what is suspect."""
        found = [line.split() for line in text.splitlines()]
        return [
            [line[0], *line[-4:]] if line[:1] and line[0].isdigit() and "(expert" in line else line
            for line in found
        ]

    said = words(shown.group().removeprefix("```text\n").removesuffix("```"))
    assert [line for line in words(done.stdout) if line] == [line for line in said if line]


def test_the_picture_is_there() -> None:
    assert "(images/inspect.png)" in TEXT
    assert (ROOT / "docs" / "images" / "inspect.png").read_bytes().startswith(b"\x89PNG")
