"""ROLL's own fsdp2 strategy, actor worker, DataProto and cluster methods, on a small Qwen3-MoE.

Lent: Ray (objects are pickled on the way instead), moving weights between host and device, and ROLL's patch
of attention for context parallelism, which its CPU platform has none of. No two tokens of a batch have the
same id, so what a forward is fed says which token sits in which row.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from zoo.qwen import EXPERTS, TOPK
from zoo.qwen_sharded import MOE

LENGTH = 16
LENGTHS = ((3, 9), (2, 4), (5, 7), (1, 6), (4, 8), (3, 3), (2, 10), (6, 5))
"""Prompt and response of each sample."""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What a job's config says."""

    folder: str
    mode: str = "R2"
    cp: int = 1
    micro: int = 2
    accumulate: int = 2
    recompute: bool | None = None
    """Reentrant, as ROLL does with experts by itself (None is that default); False: not; see `plain`."""
    plain: bool = False
    """No recompute at all."""
    lora: bool = False

    @property
    def dp(self) -> int:
        return dist.get_world_size() // self.cp

    @property
    def dp_rank(self) -> int:
        return dist.get_rank() // self.cp

    @property
    def mine(self) -> range:
        """The samples of this replica."""
        each = len(LENGTHS) // self.dp
        return range(self.dp_rank * each, (self.dp_rank + 1) * each)


def worker_config(tiny: Tiny) -> Any:
    """ROLL's own, checked by its own __post_init__."""
    from roll.configs.model_args import ModelArguments
    from roll.configs.training_args import TrainingArguments
    from roll.configs.worker_config import RouterReplayConfig, StrategyArguments, WorkerConfig

    settings = {"fsdp_size": dist.get_world_size(), "param_dtype": "fp32", "reduce_dtype": "fp32"}
    return WorkerConfig(
        name="actor_train",
        model_args=ModelArguments(
            model_name_or_path=tiny.folder,
            attn_implementation="sdpa",
            disable_gradient_checkpointing=tiny.plain,
            gradient_checkpointing_use_reentrant=tiny.recompute,
            ulysses_size=tiny.cp,
            dtype="fp32",
            lora_target="q_proj,v_proj" if tiny.lora else None,
        ),
        training_args=TrainingArguments(
            learning_rate=1e-3,
            per_device_train_batch_size=tiny.micro,
            gradient_accumulation_steps=tiny.accumulate,
            max_steps=20,
        ),
        strategy_args=StrategyArguments(
            strategy_name="fsdp2_train",
            strategy_config=settings | {"apply_expert_patch": True},  # of transformers 4; ROLL drops it on 5
        ),
        router_replay=RouterReplayConfig(mode=tiny.mode),
        infer_batch_size=tiny.micro,
    )


def pipeline_config() -> Any:
    return SimpleNamespace(
        seed=1,
        max_grad_norm=1e9,
        ppo_epochs=1,
        resume_from_checkpoint=False,
        enable_old_logprobs_recompute=True,
        use_pg_clip_range=False,
        pg_clip=0.2,
        dual_clip_loss=False,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_loss_coef=0.0,
        loss_agg_mode="token-mean",
    )


class Actor:
    """ROLL's actor worker and strategy; and its cluster's `compute_log_probs`, as a pipeline calls it."""

    def __init__(self, tiny: Tiny) -> None:
        from roll.distributed.executor.worker import RankInfo
        from roll.distributed.strategy.factory import create_strategy
        from roll.models.model_providers import default_actor_model_provider
        from roll.pipeline.base_worker import ActorWorker

        self.tiny = tiny
        # What a worker's process unpickles is what the driver has built and checked.
        config = pickle.loads(pickle.dumps(worker_config(tiny)))
        worker: Any = object.__new__(ActorWorker)  # its __init__ asks a Ray cluster for a port
        vars(worker).update(
            worker_config=config,
            pipeline_config=pipeline_config(),
            rank_info=RankInfo(world_size=dist.get_world_size(), rank=dist.get_rank()),
            worker_name="actor_train-0",
            cluster_name="actor_train",
            _logprobs_cache={},
        )
        worker.strategy = create_strategy(worker)
        worker.strategy.initialize(model_provider=default_actor_model_provider)
        self.worker = worker
        self.strategy = worker.strategy
        self.model: nn.Module = worker.strategy.model
        blocks = {
            type(module)
            for module in self.model.modules()
            if type(module).__name__.endswith("SparseMoeBlock")
        }
        if transformers.__version__ < "5":
            assert {block.forward.__module__ for block in blocks} == {
                "roll.third_party.fsdp2.qwen3_moe_patch"
            }
        self.compute_log_probs = self._of_cluster("compute_log_probs")

    def _of_cluster(self, method: str) -> Any:
        """A cluster's method by ROLL's own generator, over this rank as its only worker."""
        from roll.distributed.executor import cluster
        from roll.distributed.scheduler.decorator import Dispatch, get_predefined_dispatch_fn

        mine = SimpleNamespace(
            worker_config=self.worker.worker_config,
            dp_size=1,
            world_size=1,
            get_rank_info=lambda rank: type(self.worker.rank_info)(),
        )
        functions = get_predefined_dispatch_fn(Dispatch.DP_MP_DISPATCH_FIRST)

        def execute(name: str, data: Sequence[Any]) -> list[Any]:
            return [Ref(getattr(self.worker, name)(self._dispatched(data[0])))]

        return cluster.func_generator(mine, method, **functions, execute_fn=execute)

    def _dispatched(self, batch: Any) -> Any:
        """What this rank's worker is sent: of a context-parallel group the first alone gets a batch."""
        from roll.distributed.scheduler.protocol import DataProto

        first = self.worker.rank_info.cp_rank == 0
        return pickled(batch) if first else DataProto(batch=None, meta_info=pickled(batch.meta_info))

    def log_probs(self, batch: Any, *, blocking: bool = True) -> Any:
        """The first pass, as ROLL's pipelines have it: rlvr doesn't block, agentic does."""
        from roll.distributed.scheduler.protocol import DataProto

        answer = self.compute_log_probs(batch, blocking=blocking)
        if not blocking:
            answer = DataProto.materialize_concat(data_refs=answer)
        batch.batch["old_log_probs"] = answer.batch["log_probs"]
        batch.batch["ref_log_probs"] = answer.batch["log_probs"].clone()
        if self.tiny.cp > 1:  # there is one driver: these ranks of a test are to know what its batch has
            shared = [batch.batch.get("routed_experts")]
            dist.broadcast_object_list(shared, src=0)
            batch.batch["routed_experts"] = shared[0]
        return answer

    def update(self, batch: Any) -> dict[str, Any]:
        return self.worker.train_step(self._dispatched(batch)).meta_info["metrics"]


class Ref:
    """In the place of Ray's ObjectRef."""

    def __init__(self, value: Any) -> None:
        self.value = pickle.dumps(value)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def prepare() -> None:
    """Lend Ray's transport, and a platform that takes ROLL's context parallelism."""
    import ray

    def get(refs: Any, timeout: Any = None) -> Any:
        return (
            [pickle.loads(ref.value) for ref in refs] if isinstance(refs, list) else pickle.loads(refs.value)
        )

    ray.get = get
    ray.ObjectRef = Ref
    from roll.distributed.strategy import fsdp2_strategy
    from roll.models import model_providers
    from roll.pipeline import base_worker
    from roll.platforms.cpu import CpuPlatform

    for module in (fsdp2_strategy, model_providers):
        module.download_model = lambda name: name  # asks a Ray cluster whether it is there
    base_worker.state_offload_manger = lambda **_: nullcontext()  # from device to host, and memory counted

    # ROLL's is for flash-attn. Attention is wrong without; rows and ids aren't.
    CpuPlatform.apply_ulysses_patch = classmethod(lambda cls: {"patched": True})


def batch_of(tiny: Tiny, routes: torch.Tensor | None = None) -> Any:
    """This replica's samples as ROLL's rollout hands them on: prompt and response, padded on the right."""
    from roll.distributed.scheduler.protocol import DataProto

    starts = [1 + sum(map(sum, LENGTHS[:number])) for number in tiny.mine]
    ids, mask, response = (torch.zeros(len(starts), LENGTH, dtype=torch.int64) for _ in range(3))
    for row, (number, start) in enumerate(zip(tiny.mine, starts, strict=True)):
        prompt, answer = LENGTHS[number]
        ids[row, : prompt + answer] = torch.arange(start, start + prompt + answer)
        mask[row, : prompt + answer] = 1
        response[row, prompt : prompt + answer] = 1
    ones = torch.linspace(-1, 1, ids[:, 1:].numel()).view(ids[:, 1:].shape)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "advantages": ones,
    }
    if routes is not None:
        tensors["routed_experts"] = routes
    meta = {"is_offload_states": False, "loss_mask_keys": ["response_mask"], "global_step": 0}
    return DataProto.from_dict(tensors=tensors, meta_info=meta)


def rollout_routes(tiny: Tiny) -> list[torch.Tensor]:
    """What SGLang hands out of each sample of this replica: int32 [tokens - 1, all layers, topk]."""
    routes = []
    for number in tiny.mine:
        drawn = torch.Generator().manual_seed(number)
        shape = (sum(LENGTHS[number]) - 1, len(MOE), EXPERTS)
        ids = torch.rand(shape, generator=drawn).argsort(dim=-1)[..., :TOPK].int()
        ids[:, [layer for layer, sparse in enumerate(MOE) if not sparse]] = 0
        routes.append(ids)
    return routes
