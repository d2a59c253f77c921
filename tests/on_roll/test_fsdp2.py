"""ROLL's own fsdp2 strategy with npu_replay in it, over gloo, one process and two; job.py says what is lent.

Each case asserts on every rank. Which token sits in which row of a router, and what it chose, is what hooks
of these tests saw (qwen_sharded.witnessed).

Not run, for want of what they take: its pipelines (Ray, a rollout engine), CPU offload (pinned memory),
flash-attn, whose sequence-parallel attention the ids don't depend on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from case_jobs import Notes, check, noted, shared_folder, told
from npu_replay.errors import ReplayError
from on_roll import job
from on_roll.job import EXPERTS, LENGTHS, TOPK, Actor, Tiny, prepare
from zoo import qwen_sharded
from zoo.qwen_sharded import LABELS, Call, check_told, other_routers, save_model, whole, witnessed

__all__ = ["prepare"]
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]
WAYS: dict[str, dict[str, Any]] = {
    "reentrant": {},
    "non-reentrant": {"recompute": False},
    "no recompute": {"plain": True},
    "cp2": {"cp": 2},
}


def check_calls(calls: Sequence[Call], tiny: Tiny, batch: Any, times: int) -> None:
    """Each token of this replica went so often to the experts that the batch has for it; a row of zeros has
    none: it took two experts of its own choice."""
    columns = qwen_sharded.columns_of(batch.batch["routed_experts"].shape[2])
    qwen_sharded.check(calls, _by_token(batch), columns, times, tiny.dp_rank)


def _by_token(batch: Any) -> dict[int, torch.Tensor]:
    mask = batch.batch["attention_mask"].bool()
    pairs = zip(
        batch.batch["input_ids"][mask].tolist(), batch.batch["routed_experts"][mask].long(), strict=True
    )
    return dict(pairs)


def r2(folder: str, **settings: Any) -> None:
    actor = Actor(tiny := Tiny(folder=folder, mode="R2", **settings))
    batch = job.batch_of(tiny)
    with witnessed(actor.model) as first:
        answer = actor.log_probs(batch, blocking=tiny.cp > 1)
    assert "routed_experts" not in answer.batch
    routes = batch.batch["routed_experts"]
    assert routes.shape == (*batch.batch["input_ids"].shape, len(LABELS), TOPK)
    assert not routes[~batch.batch["attention_mask"].bool()].any()
    check_calls(first, tiny, batch, times=1)
    with other_routers(actor.model), told() as lines, witnessed(actor.model) as second:
        metrics = actor.update(batch)
    check_calls(second, tiny, batch, times=1 if tiny.plain else 2)
    check_told(lines, "R2", "100%")
    assert metrics["npu_replay/rows_without_route"] == [0.0] * len(metrics["npu_replay/rows_without_route"])
    assert metrics["npu_replay/live_mismatch"][0] > 0.5


def r3(folder: str, **settings: Any) -> None:
    actor = Actor(tiny := Tiny(folder=folder, mode="R3", **settings))
    batch = rolled_out(tiny)
    with told() as lines:
        with witnessed(actor.model) as first:
            actor.log_probs(batch)
        with other_routers(actor.model), witnessed(actor.model) as second:
            metrics = actor.update(batch)
    check_calls(first, tiny, batch, times=1)
    check_calls(second, tiny, batch, times=1 if tiny.plain else 2)
    share = len(LENGTHS) / sum(map(sum, LENGTHS))  # the last token of each sample
    check_told(lines, "R3", f"{(1 - share) * 100:.2f}%")
    assert metrics["npu_replay/bad_samples"][0] == 0.0


def rolled_out(tiny: Tiny) -> Any:
    """The batch as ROLL's own `postprocess_generate` makes it of what SGLang gave."""
    from roll.distributed.scheduler.protocol import DataProto
    from roll.utils.functionals import postprocess_generate

    whole = job.batch_of(tiny)
    prompts = []
    width = max(prompt for prompt, _ in LENGTHS)
    output = torch.zeros(len(tiny.mine), whole.batch["input_ids"].shape[1], dtype=torch.int64)
    mask = torch.zeros(len(tiny.mine), width, dtype=torch.int64)
    for row, number in enumerate(tiny.mine):
        prompt, answer = LENGTHS[number]
        output[row, width - prompt : width + answer] = whole.batch["input_ids"][row, : prompt + answer]
        mask[row, width - prompt :] = 1
        prompts.append(output[row, :width])
    asked = DataProto.from_dict(
        tensors={
            "input_ids": torch.stack(prompts),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
    )
    made = postprocess_generate(
        asked,
        output.clone(),
        num_return_sequences=1,
        sequence_length=output.shape[1],
        eos_token_id=qwen_sharded.VOCAB,
        pad_token_id=0,
        routed_experts=job.rollout_routes(tiny),
    )
    for name in ("attention_mask", "response_mask"):
        assert torch.equal(made.batch[name], whole.batch[name])
    mask = whole.batch["attention_mask"].bool()
    assert torch.equal(made.batch["input_ids"][mask], whole.batch["input_ids"][mask])
    made.batch["input_ids"] = whole.batch["input_ids"]  # ROLL leaves tokens in the padding
    assert made.batch["routed_experts"].dtype == torch.uint8
    made.batch["advantages"] = whole.batch["advantages"]
    made.meta_info = whole.meta_info
    return made


def two_steps_and_epochs(folder: str, **settings: Any) -> None:
    """Optimizer steps, epochs, samples shuffled by ROLL: the record of the first pass holds in all."""
    actor = Actor(tiny := Tiny(folder=folder, mode="R2", accumulate=1, **settings))
    actor.worker.pipeline_config.ppo_epochs = 2
    batch = job.batch_of(tiny)
    actor.log_probs(batch)
    with other_routers(actor.model), witnessed(actor.model) as calls:
        metrics = actor.update(batch)
    check_calls(calls, tiny, batch, times=4)
    steps = 2 * len(tiny.mine) // tiny.micro
    assert len(metrics["npu_replay/seconds"]) == steps


def reference_of_lora(folder: str, **settings: Any) -> None:
    """The actor without its adapter is the reference: nothing is recorded of it, nor replayed in it."""
    actor = Actor(tiny := Tiny(folder=folder, mode="R2", lora=True, **settings))
    batch = job.batch_of(tiny)
    batch.meta_info["disable_adapter"] = True
    reference = actor.compute_log_probs(batch)
    assert "routed_experts" not in batch.batch
    assert "routed_experts" not in reference.batch
    batch.meta_info["disable_adapter"] = False
    actor.log_probs(batch)
    with other_routers(actor.model), witnessed(actor.model) as calls:
        actor.update(batch)
    check_calls(calls, tiny, batch, times=2)


def one_rank_fails(folder: str, **settings: Any) -> None:
    """A bad id on the last rank: all stop before an optimizer steps, the lowest with the whole message."""
    actor = Actor(tiny := Tiny(folder=folder, mode="R2", **settings))
    batch = job.batch_of(tiny)
    actor.log_probs(batch)
    weights = {name: whole(weight) for name, weight in actor.model.named_parameters()}
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        batch.batch["routed_experts"][2, 1, 0, 0] = EXPERTS + 69
    text = refused(actor, batch)
    assert (f"{EXPERTS + 69}" in text) if dist.get_rank() == last else (f"rank {last} stopped" in text), text
    assert all(torch.equal(whole(weight), weights[name]) for name, weight in actor.model.named_parameters())
    nothing_is_on()


def another_order(folder: str, **settings: Any) -> None:
    """Micro-batches that come in another order than the batch's on one rank: all stop, and nobody waits."""
    actor = Actor(tiny := Tiny(folder=folder, mode="R2", **settings))
    kind = type(job.batch_of(tiny))
    batch = job.batch_of(tiny)
    chunk = kind.chunk
    if dist.get_rank() == 0:
        kind.chunk = lambda self, chunks: chunk(self, chunks)[::-1] if chunks > 1 else chunk(self, chunks)
    try:
        with pytest.raises(ReplayError, match="isn't the next one of the batch"):
            actor.log_probs(batch)
    finally:
        kind.chunk = chunk
    nothing_is_on()


def routes_are_missing(folder: str, **settings: Any) -> None:
    for mode, cause in (("R2", "enable_old_logprobs_recompute"), ("R3", "sglang")):
        actor = Actor(tiny := Tiny(folder=folder, mode=mode, **settings))
        batch = job.batch_of(tiny)
        batch.batch["old_log_probs"] = batch.batch["ref_log_probs"] = torch.zeros_like(
            batch.batch["advantages"]
        )
        assert cause in (text := refused(actor, batch)) or "rank 0 stopped" in text
        nothing_is_on()


def refused(actor: Actor, batch: Any) -> str:
    """Why an update stopped."""
    with pytest.raises(ReplayError) as raised:
        actor.update(batch)
    return str(raised.value)


def nothing_is_on() -> None:
    from npu_replay.compat.verl import engine_adapter
    from npu_replay.compat.verl.engine_pass import current
    from npu_replay.sessions.session import open_sessions

    assert (current().action, current().engine) == ("", None)
    assert not any(getattr(adapter, "batch", None) for adapter in engine_adapter._adapters.values())
    assert not open_sessions()


@functools.cache
def _weights_in() -> str:
    return save_model(shared_folder())


def _run(case: Callable[..., None], settings: dict[str, Any]) -> None:
    case(_weights_in(), **settings)
    nothing_is_on()


CASES: dict[str, Callable[[], None]] = {
    **{f"R2: {way}": partial(_run, r2, settings) for way, settings in WAYS.items()},
    **{f"R3: {way}": partial(_run, r3, settings) for way, settings in WAYS.items()},
    "optimizer steps and epochs": partial(_run, two_steps_and_epochs, {}),
    "reference of a LoRA actor": partial(_run, reference_of_lora, {}),
    "one rank fails": partial(_run, one_rank_fails, {}),
    "another order": partial(_run, another_order, {}),
    "routes are missing": partial(_run, routes_are_missing, {}),
}


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return noted(request, tmp_path_factory, "on_roll.test_fsdp2", ranks=1)


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return noted(request, tmp_path_factory, "on_roll.test_fsdp2", ranks=2)


@pytest.mark.parametrize("case", ["R2: reentrant", "R3: non-reentrant"])
def test_rolls_own_strategy_alone(alone: Notes, case: str) -> None:
    check(alone, case)


@pytest.mark.parametrize("case", CASES)
def test_rolls_own_strategy_in_two_processes(together: Notes, case: str) -> None:
    check(together, case)
