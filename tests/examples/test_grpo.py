"""The GRPO example: a server that is started again, or is gone, ends a run before an optimizer steps; and the
same command goes on with a run that was cut off.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import json_server
import vllm_outputs
from npu_replay import ReplayError
from vllm_outputs import QWEN

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo"
SAMPLED = vllm_outputs.sampled(QWEN, prompt=4, output=6)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A server that says `versions` of its weights, one after the other, and what it was asked."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    config = {"num_hidden_layers": QWEN.num_layers, "num_experts": 128, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[tuple[str, Any]] = []
    engine = SimpleNamespace(versions=[], asked=asked)

    def answer(path: str, body: Any) -> Any:
        asked.append((path, body))
        if path == "/weight_info":
            return {"weight_version": engine.versions.pop(0)}
        response = vllm_outputs.answer("0.30.0", QWEN, SAMPLED)
        response["choices"][0]["logprobs"] = {"token_logprobs": [0.0] * len(SAMPLED.output)}
        return response

    with json_server.serving(answer) as address:
        engine.server = importlib.import_module("server").Server(address, str(tmp_path))
        yield engine
    for file in EXAMPLE.glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_samples_and_weights_carry_the_number_that_the_server_says(engine: SimpleNamespace) -> None:
    engine.versions = ["3", "3", "3"]
    (sample,) = engine.server.sample([SAMPLED.prompt], each=1, longest=6)
    assert sample.tokens.tolist() == SAMPLED.tokens
    assert sample.routes.weight_version == 3
    assert engine.server.load("a folder") == 4
    assert engine.asked[-1] == ("/update_weight_version", {"new_version": "4"})


def test_a_server_that_was_started_again_is_refused(engine: SimpleNamespace) -> None:
    engine.versions = ["3", *["default"] * 4]  # and after that it breaks the connection
    with pytest.raises(ReplayError, match="the server's weights changed while it sampled"):
        engine.server.sample([SAMPLED.prompt], each=1, longest=6)
    with pytest.raises(ReplayError, match="doesn't know how often it was given weights"):
        engine.server.load("a folder")
    with pytest.raises(ReplayError, match="the rollout engine gave no answer"):
        engine.server.load("a folder")


def test_a_step_takes_no_samples_of_other_weights(engine: SimpleNamespace) -> None:
    engine.versions = ["default", "default"]
    settings = importlib.import_module("settings").Settings(prompts=1, group=1)
    run = SimpleNamespace(settings=settings, seed=0, version=2, _timed=lambda part: contextlib.nullcontext())
    run.road = SimpleNamespace(
        sample=lambda prompts, each: engine.server.sample([SAMPLED.prompt], each=each, longest=6)
    )
    with pytest.raises(RuntimeError, match=r"samples of weights 2 are wanted, got \{None\}"):
        importlib.import_module("loop").Grpo._step(run, 0)


@pytest.mark.usefixtures("engine")
def test_a_run_that_was_cut_off_goes_on_after_the_last_step_that_it_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(every: list[int], mine: int) -> None:
        every[:] = [mine]

    checkpoints = importlib.import_module("checkpoints")
    alone = SimpleNamespace(
        get_rank=lambda: 0, get_world_size=lambda: 1, all_gather_object=gather, barrier=lambda: None
    )
    monkeypatch.setattr(checkpoints, "dist", alone)
    rows = tmp_path / "R3-0.jsonl"
    model = torch.nn.Linear(2, 2)
    assert checkpoints.load(rows, [model]) == 0
    checkpoints.save(rows, [model], {"step": 0})
    kept = model.weight.detach().clone()
    model.requires_grad_(False).weight.zero_()
    rows.write_text(rows.read_text() + '{"step": 1}\n')  # its checkpoint wasn't written
    assert checkpoints.load(rows, [model]) == 1
    assert torch.equal(model.weight, kept)
    checkpoints.save(rows, [model], {"step": 1})
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [0, 1]
