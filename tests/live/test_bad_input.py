"""What an engine does wrong is an error that names it before an optimizer steps; and the run goes on."""

from __future__ import annotations

import copy
import json
import urllib.error
from typing import Any

import numpy as np
import pytest
import torch

from live.engine import Live
from live.families import FAMILIES, VOCABULARY
from live.held import Trainer
from npu_replay import RoutedExperts, from_vllm
from npu_replay.errors import InvalidRoutes, ReplayError

ASKED = np.random.default_rng(1).integers(3, VOCABULARY, 80).tolist()
SAMPLING = {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(server_of: Any) -> Live:
    found: Live = server_of("Qwen3Moe")
    return found


def sample(live: Live, config: Any = None) -> tuple[list[int], RoutedExperts]:
    """One sample by a client that knows what it asked for."""
    answer = live.engine.ask("/v1/completions", prompt=ASKED, **SAMPLING)
    (routes,) = from_vllm(answer, config or live.folder, prompt_token_ids=ASKED)
    return [*ASKED, *json.loads(answer)["choices"][0]["token_ids"]], routes


def refused(live: Live, error: type[ReplayError], words: str, config: Any) -> None:
    """A loop with this config ends with that error, its weights untouched; with the right one it goes on."""
    trainer = Trainer(copy.deepcopy(live.model))
    with pytest.raises(error, match=words):
        trainer.step(*sample(live, config))
    assert trainer.steps == 0
    for ours, before in zip(trainer.model.parameters(), live.model.parameters(), strict=True):
        assert torch.equal(ours, before)
    trainer.step(*sample(live))
    assert trainer.steps == 1


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Qwen3Moe"])
def test_the_config_of_another_family(served: Live, saved: Any, family: str) -> None:
    words = "columns|top-k|out of range|dense layer"
    refused(served, InvalidRoutes, words, saved(family)[1])


@pytest.mark.parametrize(
    ("experts", "error", "words"),
    [
        pytest.param(16, InvalidRoutes, "out of range", id="fewer"),
        pytest.param(64, ReplayError, "experts", id="more-cant-be-seen-at-the-door-but-by-the-trainer"),
    ],
)
def test_a_config_with_other_experts(
    served: Live, experts: int, error: type[ReplayError], words: str
) -> None:
    changes = {"num_experts": experts, "architectures": ["Qwen3MoeForCausalLM"]}
    refused(served, error, words, {**served.model.config.to_dict(), **changes})


def test_what_a_server_refuses_is_quoted(served: Live) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.engine.ask("/v1/completions", prompt=[*ASKED] * 20, **SAMPLING)
    with pytest.raises(InvalidRoutes, match=r"the server refused.*1024"):
        from_vllm(caught.value.read(), served.folder)
