"""README's R3 as it stands, with a live vLLM: text in, routes out, replayed by transformers.

Its model has more experts than a byte can name (T19).
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from live.held import assert_right

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
(R3,) = (block for block in BLOCKS if "from vllm import" in block)


def test_the_example_replays_what_the_engine_used(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    from live import engine

    _, folder = saved("Qwen3Moe", num_experts=300, num_hidden_layers=4, num_experts_per_tok=8)
    shutil.copytree(folder, tmp_path / "Qwen3-30B-A3B")
    monkeypatch.chdir(tmp_path)
    import live.rotary  # noqa: F401 - before vLLM builds a model

    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, **engine.SMALL))
    names: dict[str, Any] = {}
    exec(compile(R3, "README.md", "exec"), names)
    model = names["model"]
    tokens = names["tokens"]
    routes = names["routes"]
    assert len(routes) > 6
    assert routes.ids.max() > 255
    assert_right(model, tokens[0], routes)
    assert (names["ratio"] == 1).all(), "both passes are replayed"
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
    with torch.no_grad(), npu_replay.record(model) as own:
        model(tokens)
    assert npu_replay.compare([routes], own.routes).router_mismatch < 0.05, "the same weights, in float32"
