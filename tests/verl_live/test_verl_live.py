"""verl's own rollout and trainer with a live vLLM engine: its rows, and what Megatron's routers make of them.

`main_ppo` over Ray: GRPO in two steps of two updates with R3, single turns and turns with a tool. Megatron
trains in bfloat16, vLLM rolls out in float32. The truth for each row are transformers' router logits, with
the weights that verl handed to the engine for that step. All on a CPU, so verl is lent what it has none of
(cpu_platform.py, engine.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

import jobs
from live.families import truth
from verl_live import job, tiny

pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(560)]

Tensors = dict[str, torch.Tensor]

ENVIRONMENT: dict[str, str | None] = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_live.cpu_platform,npu_replay",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHELASTIC_USE_AGENT_STORE": None,  # Ray's workers have a store of their own
}


@dataclass
class Job:
    """What a job has left: the passes of its trainer, step by step, and what it logged."""

    folder: Path
    output: str
    metrics: list[dict[str, float]] = field(default_factory=list)

    @cached_property
    def steps(self) -> list[Step]:
        steps: list[Step] = []
        for path in sorted((self.folder / "notes").glob("*.pt")):
            note = torch.load(path)
            if note["kind"] == "weights":
                steps.append(Step(note["weights"], self.folder / "model"))
            else:
                steps[-1].passes.append(Pass(**note))
        assert not steps[-1].passes, "the last weights come after the last step"
        return steps


@dataclass
class Step:
    """The weights that the engine was given, and the trainer's passes over what it sampled with them."""

    weights: Tensors
    model: Path
    passes: list[Pass] = field(default_factory=list)

    @cached_property
    def router(self) -> Any:
        """transformers' model with these weights."""
        return like(self.model, self.weights)


@dataclass
class Pass:
    """One pass of verl's Megatron engine.

    Attributes:
        kind: "log-probs" or "update".
        tokens: of each sample, prompt and response.
        routes: of each sample, [tokens, layers, topk], as the engine's rows came in; zeros: none.
        shown: by micro-batch, what the routers' outputs showed, and their layers.
    """

    kind: str
    tokens: list[torch.Tensor]
    routes: list[torch.Tensor]
    shown: list[tuple[torch.Tensor, Sequence[int]]]

    def by_sample(self) -> list[torch.Tensor]:
        """What was shown, [tokens, layers, topk] of each sample."""
        assert all(list(layers) == list(range(tiny.LAYERS)) for _, layers in self.shown)
        rows = torch.cat([ids for ids, _ in self.shown])
        return list(rows.split([len(sample) for sample in self.tokens]))


def like(folder: Path, weights: Tensors) -> Any:
    """transformers' model with weights by the names of a checkpoint, in float32."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    saved = folder.parent / "exported"
    AutoConfig.from_pretrained(folder).save_pretrained(saved)
    whole = {name: weight.float().contiguous() for name, weight in weights.items()}
    save_file(whole, saved / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()


def choice(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers' routers choose, [tokens, layers, topk]."""
    return torch.from_numpy(truth(model, tokens.tolist()).ids)


def differing(ours: torch.Tensor, theirs: torch.Tensor, where: torch.Tensor) -> int:
    """How many token-layers have other experts."""
    unlike: torch.Tensor = (ours.long().sort(dim=-1).values != theirs.long().sort(dim=-1).values).any(dim=-1)
    return int(unlike[where].sum())


def known(routes: torch.Tensor) -> torch.Tensor:
    """Which tokens have a row."""
    return (routes != 0).flatten(1).any(dim=1)


def start(target: str, folder: Path) -> jobs.Ended:
    (ended,) = jobs.start(
        target,
        fresh=True,
        env=ENVIRONMENT | {"VERL_LIVE_NOTES": str(folder / "notes")},
        path=[named_vllm(folder / "names"), jobs.TESTS],
        folder=folder,
        timeout=500,
    )
    assert not ended.problem, ended.problem
    return ended


def named_vllm(folder: Path) -> Path:
    """verl asks for a distribution «vllm», and vLLM for "cpu" in its version: the package is vllm-cpu."""
    try:
        version("vllm")
    except PackageNotFoundError:
        release = version("vllm-cpu") + "+cpu"
        about = folder / f"vllm-{release}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    return folder


@pytest.fixture(scope="module", params=["ids", pytest.param("ray", marks=pytest.mark.long)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Batches carry ids, or references to Ray's store, which tests/on_verl/test_delivery.py has, too."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ray":
            patch.setitem(ENVIRONMENT, "NPU_REPLAY_DELIVERY", "ray")
        patch.setitem(ENVIRONMENT, "VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
        ended = start("verl_live.job:main", folder)
    logged = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = Job(folder, ended.output, logged)
    assert [len(step.passes) for step in run.steps] == [3] * job.STEPS + [0]
    return run


def test_the_engines_rows_are_those_of_the_weights_it_was_given(trained: Job) -> None:
    """In each step: so verl's way of the weights back into the engine is whole, too."""
    for step, before in zip(trained.steps[:-1], [None, *trained.steps], strict=False):
        (passed,) = (passed for passed in step.passes if passed.kind == "log-probs")
        assert len(passed.tokens) == job.PROMPTS * job.SAMPLES
        rows = 0
        wrong = 0
        with_older = 0
        for tokens, routes in zip(passed.tokens, passed.routes, strict=True):
            has = known(routes)
            assert bool(has[:-1].all()), "a token without a row, and not the last"
            rows += int(has.sum()) * tiny.LAYERS
            wrong += differing(routes, choice(step.router, tokens), has)
            if before is not None:
                with_older += differing(routes, choice(before.router, tokens), has)
        assert rows > 500
        assert wrong == 0, f"{wrong} of {rows} token-layers"
        assert before is None or with_older > 0, "the weights made no difference: nothing was checked"


def test_every_pass_of_the_trainer_runs_with_the_engines_experts(trained: Job) -> None:
    """Read off the routers' outputs. The last token is its router's own: nothing comes after it."""
    for step in trained.steps:
        kinds = [passed.kind for passed in step.passes]
        assert kinds == ["log-probs", "update", "update"][: len(kinds)]
        for passed in step.passes:
            shown = passed.by_sample()
            rows = 0
            wrong = 0
            for ours, routes in zip(shown, passed.routes, strict=True):
                has = known(routes)
                has[-1] = False
                rows += int(has.sum()) * tiny.LAYERS
                wrong += differing(ours, routes, has)
            assert rows > 200
            assert wrong == 0, f"{passed.kind}: {wrong} of {rows} token-layers"


def test_samples_with_a_tool_have_a_row_for_each_token(trained: Job) -> None:
    """verl's loop with tools: what a tool wrote runs through the engine with the next turn."""
    role = tiny.words().index("tool")
    with_tool = [
        routes
        for step in trained.steps
        for passed in step.passes[:1]
        for tokens, routes in zip(passed.tokens, passed.routes, strict=True)
        if role in tokens[job.RESPONSE // 2 :]
    ]
    assert len(with_tool) > 3
    assert all(bool(known(routes)[:-1].all()) for routes in with_tool)
    assert max(metrics["num_turns/max"] for metrics in trained.metrics) >= 4


def test_verls_metrics_say_what_was_replayed(trained: Job) -> None:
    assert len(trained.metrics) == job.STEPS
    first = trained.metrics[0]["actor/npu_replay/live_mismatch"]
    assert 0 < first < 0.2, "bfloat16 against float32: some choices differ, and few"
    for step, metrics in zip(trained.steps, trained.metrics, strict=False):
        updates = [passed for passed in step.passes if passed.kind == "update"]
        shares = [len(update.tokens) / sum(map(len, update.tokens)) for update in updates]
        assert metrics["actor/npu_replay/rows_without_route"] == pytest.approx(sum(shares) / len(shares))
        assert metrics["actor/npu_replay/bad_samples"] == 0
        assert abs(metrics["rollout_corr/k3_kl"]) < 1e-3
        assert metrics["actor/grad_norm"] > 0
    lines = [line for line in trained.output.splitlines() if "[npu_replay] R3:" in line]
    assert len(lines) == 1
    assert "3 routers, 3 replayed" in lines[0]
