"""What verl 0.7's other worker does with npu_replay in it: megatron_workers over MegatronPPOActor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from verl import DataProto

import npu_replay
from on_verl import engine_job as job
from on_verl.engine_cases import BASE, begin, case_of, check_rows, check_told, in_rows, nothing_is_on, told
from on_verl.engine_job import LENGTHS, Tiny

CASES: dict[str, Callable[[], None]] = {}
case = case_of(CASES)


def worker(tiny: Tiny) -> Any:
    """verl's worker with its actor, as init_model leaves it."""
    from verl.utils.megatron.optimizer import (
        get_megatron_optimizer,
        get_megatron_optimizer_param_scheduler,
        init_megatron_optim_config,
    )
    from verl.workers.actor.megatron_actor import MegatronPPOActor
    from verl.workers.megatron_workers import ActorRolloutRefWorker

    found = ActorRolloutRefWorker(config=OmegaConf.create(_config(tiny)), role="actor")
    found.config.actor.profiler = {"tool": None}  # 0.7.0's actor reads it, after the worker has
    found.tf_config = job.transformer_config(tiny)
    found.actor_module = job.chunks_of(tiny, found.tf_config, wrapped=True)
    settings = job.optimizer_config()
    found.actor_optimizer = get_megatron_optimizer(
        model=found.actor_module,
        config=init_megatron_optim_config(settings, use_distributed_optimizer=False),
    )
    found.actor_optimizer_scheduler = get_megatron_optimizer_param_scheduler(
        optimizer=found.actor_optimizer, config=settings
    )
    found.peft_cls = job.Adapter() if tiny.lora else None
    found.flops_counter = SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0))
    found.actor = MegatronPPOActor(
        config=found.config.actor,
        model_config=SimpleNamespace(vocab_size=job.VOCAB, hidden_size=found.tf_config.hidden_size),
        hf_config=job.model_config(tiny).hf_config,
        tf_config=found.tf_config,
        actor_module=found.actor_module,
        actor_optimizer=found.actor_optimizer,
    )
    found.gradients = []
    step = found.actor_optimizer.step

    def stepped() -> Any:
        found.gradients.append(job.gradients(found.actor_module))
        return step()

    found.actor_optimizer.step = stepped
    return found


def _config(tiny: Tiny) -> dict[str, Any]:
    passes = {
        "log_prob_micro_batch_size_per_gpu": tiny.micro,
        "log_prob_max_token_len_per_gpu": tiny.most,
        "log_prob_use_dynamic_bsz": tiny.most > 0,
    }
    return {
        "actor": {
            "strategy": "megatron",
            "router_replay": {"mode": tiny.mode},
            "megatron": {
                "seed": 1,
                "tensor_model_parallel_size": tiny.split.tp,
                "context_parallel_size": tiny.split.cp,
                "sequence_parallel": tiny.split.tp > 1,
                "use_remove_padding": True,
            },
            "ppo_mini_batch_size": len(LENGTHS),
            "ppo_micro_batch_size_per_gpu": tiny.micro,
            "ppo_epochs": 1,
            "ppo_max_token_len_per_gpu": tiny.most,
            "use_dynamic_bsz": tiny.most > 0,
            "use_kl_loss": False,
            "shuffle": False,
            "data_loader_seed": 1,
            "entropy_coeff": 0.0,
            "clip_ratio": 0.2,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
            "clip_ratio_c": 3.0,
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": None,
            "policy_loss": {"loss_mode": "vanilla"},
            "global_batch_info": {},
        },
        "rollout": {
            "name": "vllm",
            "n": 1,
            "temperature": 1.0,
            "enable_rollout_routing_replay": tiny.mode == "R3",
            **passes,
        },
        "ref": passes,
    }


def _batch(tiny: Tiny, routes: Any = None) -> DataProto:
    data = job.batch(tiny.split, routes)
    data.meta_info["global_token_num"] = [sum(LENGTHS[number]) for number in job.mine(tiny.split)]
    return data


def _of_samples(routes: torch.Tensor, tiny: Tiny) -> list[torch.Tensor]:
    """Padded routes without their padding."""
    kept = _batch(tiny).batch["attention_mask"].bool()
    return [one[mask] for one, mask in zip(routes, kept, strict=True)]


def _collected(routes: torch.Tensor | None, tiny: Tiny) -> torch.Tensor:
    """The driver takes a stage's answer from the last one; all have the same."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (tiny.split.ranks["dp"], routes))
    mine = [one for rank, one in everyones if rank == tiny.split.ranks["dp"]]
    assert all(torch.equal(mine[0], one) for one in mine)
    return mine[-1]  # type: ignore[no-any-return]


def _same_gradients(ours: Any, theirs: Any) -> None:
    assert len(ours.gradients) == len(theirs.gradients) > 0
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        assert any(one.any() for one in a)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def _metrics(output: DataProto, tiny: Tiny) -> dict[str, Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (tiny.split.ranks, output.meta_info["metrics"]))
    return next(one for ranks, one in everyones if ranks["pp"] == tiny.split.pp - 1)  # type: ignore[no-any-return]


def _r2(settings: dict[str, Any]) -> None:
    tiny = begin(mode="R2", **settings)
    actor, plain = worker(tiny), worker(replace(tiny, mode="disabled"))
    ours, theirs = list(actor.actor_module), list(plain.actor_module)
    data = _batch(tiny)
    with npu_replay.observe(ours) as first:
        output = actor.compute_log_prob(_batch(tiny))
    with npu_replay.record(theirs) as own:
        live = plain.compute_log_prob(_batch(tiny))
    assert torch.equal(output.batch["old_log_probs"], live.batch["old_log_probs"])
    whole = _collected(output.batch["routed_experts"], tiny)
    columns = [layer for layer, moe in enumerate(tiny.moe) if moe]
    assert whole.shape == (len(job.mine(tiny.split)), job.PROMPT + job.RESPONSE, len(columns), 2)
    routes = _of_samples(whole, tiny)
    if not tiny.most:
        check_rows(first.shown, routes, columns, tiny)
    data.batch["old_log_probs"] = output.batch["old_log_probs"]
    others = _batch(tiny)
    others.batch["old_log_probs"] = output.batch["old_log_probs"]
    data.batch["routed_experts"] = whole
    with job.other_routers(ours, theirs), told() as lines:
        with npu_replay.observe(ours) as second:
            updated = actor.update_actor(data)
        with npu_replay.replay(theirs, own.routes):
            plain.update_actor(others)
    if tiny.most:
        for a, b in zip(first.shown, second.shown, strict=True):
            assert torch.equal(a.ids.long().sort(-1).values, b.ids.long().sort(-1).values)
    else:
        check_rows(second.shown, routes, columns, tiny)
    _same_gradients(actor, plain)
    check_told(lines, "R2", len(columns), "100%")
    metrics = _metrics(updated, tiny)
    assert metrics["npu_replay/rows_without_route"] == [0.0]
    assert metrics["npu_replay/bad_samples"] == [0.0]
    assert 0.1 < metrics["npu_replay/live_mismatch"][0] <= 1
    nothing_is_on()


def _r3(settings: dict[str, Any]) -> None:
    tiny = begin(mode="R3", **settings)
    actor, plain = worker(tiny), worker(replace(tiny, mode="disabled"))
    ours, theirs = list(actor.actor_module), list(plain.actor_module)
    routes = job.rollout_routes(tiny)
    rows, columns = in_rows(tiny, routes), range(len(tiny.moe))
    with told() as lines:
        with npu_replay.observe(ours) as first:
            output = actor.compute_log_prob(_batch(tiny, routes))
        check_rows(first.shown, routes, columns, tiny)
        data, others = _batch(tiny, routes), _batch(tiny)
        for one in (data, others):
            one.batch["old_log_probs"] = output.batch["old_log_probs"]
        with npu_replay.observe(ours) as second:
            updated = actor.update_actor(data)
        check_rows(second.shown, routes, columns, tiny)
        with npu_replay.replay(theirs, rows):
            plain.update_actor(others)
    _same_gradients(actor, plain)
    assert max(map(abs, _metrics(updated, tiny)["actor/ppo_kl"])) == 0.0
    assert len(lines) == (dist.get_rank() == 0)
    nothing_is_on()


for _name in ("dp2", "pp2", "pp2 and a stage of dense layers", "tp2 with sequence parallel", "cp2"):
    CASES[f"0.7's actor, R2: {_name}"] = lambda settings=BASE[_name]: _r2(settings)  # type: ignore[misc]
    CASES[f"0.7's actor, R3: {_name}"] = lambda settings=BASE[_name]: _r3(settings)  # type: ignore[misc]
for _name in ("pp2, two virtual stages and a dense chunk", "dynamic micro-batches", "full recompute"):
    CASES[f"0.7's actor, R2: {_name}"] = lambda settings=BASE[_name]: _r2(settings)  # type: ignore[misc]


@case("0.7's actor without its adapter")
def _lora() -> None:
    """Its reference pass is neither recorded nor replayed, and brings no routes."""
    for mode in ("R2", "R3"):
        tiny = begin(mode=mode, lora=True)
        actor, plain = worker(tiny), worker(replace(tiny, mode="disabled"))
        routes = job.rollout_routes(tiny)
        with told() as lines:
            found = actor.compute_ref_log_prob(_batch(tiny, routes))
            wanted = plain.compute_ref_log_prob(_batch(tiny))
        assert torch.equal(found.batch["ref_log_prob"], wanted.batch["ref_log_prob"])
        assert "routed_experts" not in found.batch.keys()  # noqa: SIM118  a TensorDict iterates over rows
        assert lines == []
        assert actor.peft_cls.off == 1
        nothing_is_on()
        with npu_replay.observe(list(actor.actor_module)) as seen:
            output = actor.compute_log_prob(_batch(tiny, routes if mode == "R3" else None))
        own = routes if mode == "R3" else _of_samples(output.batch["routed_experts"], tiny)
        check_rows(seen.shown, own, range(len(tiny.moe)), tiny)
        nothing_is_on()
