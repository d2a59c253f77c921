"""verl's engines, to the last bit, in the states of npu_replay in a process: a job that asks for no replay is
untouched, and so is one that has turned replay off."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from untouched import ABSENT, LOADED, STATES, outcomes
from zoo import qwen, qwen_sharded

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]

IMPORTS = (
    "ray",
    "tensordict",
    "hydra",
    "peft",
    "datasets",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


OF_MEGATRON = pytest.mark.skipif(
    version("megatron-core").startswith("0.12."),
    reason="verl's own engine asks for vp_stage, which it hasn't",
)


# Engines of older releases are wrapped in the same way: there in ci/all.sh.
OF_OLDER = [pytest.mark.long] if version("verl") < "0.9" else []


@pytest.mark.parametrize(
    "engine",
    [pytest.param("megatron", marks=[OF_MEGATRON, *OF_OLDER]), pytest.param("fsdp2", marks=OF_OLDER)],
)
def test_an_engine_trains_as_without_the_package(tmp_path: Path, engine: str) -> None:
    """Log-probs, gradients and weights of some steps."""
    task = {"engine": engine, "platform": version("verl") >= "0.9", "model": str(tmp_path / "model")}
    if engine == "fsdp2":
        model = qwen.make(qwen_sharded.VOCAB, len(qwen_sharded.MOE), seed=3, mlp_only_layers=[1])
        model.save_pretrained(task["model"])
        tokens = map(str, range(qwen_sharded.VOCAB))
        qwen.tokenizer(tokens, pad_token="0").save_pretrained(task["model"])
    # The variables are read by the entry point, which is the same for every engine.
    states = STATES if engine == "megatron" else {state: {} for state in (ABSENT, *LOADED)}
    by_state = outcomes("on_verl.untouched_verl", tmp_path, states=states, imports=IMPORTS, **task)
    for state, outcome in by_state.items():
        assert outcome == by_state[ABSENT], state
