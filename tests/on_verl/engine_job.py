"""verl's own Megatron engine and workers on a small model.

What a bridge, Transformer Engine or a device would have given is made here; the rest is verl's as released.

Each rank has its own samples where it is another data-parallel rank, and the same ones otherwise.
"""

from __future__ import annotations

import importlib
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import verl
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import pad
from verl import DataProto
from verl.utils import tensordict_utils as tu

from npu_replay import RoutedModel
from npu_replay.compat.verl import r3_store
from npu_replay.compat.verl.batch_routes import COLUMN
from npu_replay.smoke import megatron_model
from piece_files import FileCarrier
from verl_configs import PADS_TO_MINI_BATCH
from zoo import gpt_split, hybrid
from zoo.gpt_split import EXPERTS, TOPK, Split, share
from zoo.outcome import changed

RELEASE: str = verl.__version__
VOCAB = 64
PROMPT = 6
RESPONSE = 12
LENGTHS = ((3, 6), (2, 9), (5, 6), (4, 5), (6, 5), (3, 8), (1, 10), (4, 7))
"""Tokens of the prompt and of the response of each sample; two neighbours have no more rows than others."""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What a job's config says of its model, its cut and its passes."""

    split: Split = field(default_factory=Split)
    moe: tuple[int, ...] = (1, 1, 1, 1)
    pattern: str = ""
    """Of a HybridModel; a GPTModel without one."""
    mode: str = "R2"
    micro: int = 2
    most: int = 0
    """Tokens of a micro-batch, where its size is dynamic."""
    padded: str = ""
    """To the longest sequence of the «micro»-batch or the «mini»-batch; sequences are packed without one."""
    changes: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    forward_only: bool = False
    value: bool = False
    lora: bool = False

    @staticmethod
    def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The prompt and the response of all samples, int64."""
        drawn = torch.Generator().manual_seed(5)
        return [tuple(torch.randint(1, VOCAB, (size,), generator=drawn) for size in pair) for pair in LENGTHS]  # type: ignore[misc]


def start(split: Split) -> Split:
    """Megatron's parallel state anew, as an engine of verl makes it; the split with this rank's places."""
    from megatron.core import parallel_state

    _release_wrapped()
    # Which 0.12 forgets to forget.
    parallel_state._EMBEDDING_GLOBAL_RANKS = parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
    return split.start(gloo=True)


_wrapped: list[Any] = []
"""Megatron's wrappers of chunks, until the next start."""


def _release_wrapped() -> None:
    """Empty the wrappers of the engines before, which gc can't free.

    A wrapper holds its model, whose dispatchers keep a graph, and that graph's nodes hold the wrapper by its
    hooks; gc doesn't look into autograd's nodes. From Megatron-core 0.17 on modules hold process groups, too.
    """
    for wrapper in _wrapped:
        vars(wrapper).clear()
    _wrapped.clear()


# The model


def transformer_config(tiny: Tiny) -> Any:
    """As a bridge makes it, and verl overrides it."""
    layers: dict[str, Any] = {"moe_layer_freq": list(tiny.moe)}
    if tiny.pattern:
        layers = {"num_layers": len(hybrid.symbols(tiny.pattern))}
    config = tiny.split.config(**layers, **tiny.changes)
    config.calculate_per_token_loss = False
    config.variable_seq_lengths = True
    if tiny.mode != "disabled":
        name = "moe_enable_routing_replay" if hasattr(config, "moe_enable_routing_replay") else ""
        setattr(config, name or "enable_routing_replay", True)
    return config


def chunks_of(tiny: Tiny, config: Any, *, wrapped: bool) -> list[nn.Module]:
    """This rank's chunks, through verl's own get_model; copies of a weight are equal on all ranks."""
    from verl.utils import megatron_utils

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None, **_: Any) -> nn.Module:
        ends = {"pre_process": pre_process, "post_process": post_process}
        build: Any = megatron_model.model
        if tiny.pattern:
            build = partial(hybrid.model, pattern=tiny.pattern)
        chunk = build(config, vp_stage=vp_stage, **ends, **gpt_split.PARTS)
        if tiny.value and post_process:
            chunk.output_layer = _ValueHead(config)
        return chunk

    takes = inspect.signature(megatron_utils.get_model).parameters
    more = {"transformer_config": config} if "transformer_config" in takes else {}
    chunks = list(megatron_utils.get_model(provider, wrap_with_ddp=False, **more))
    fill(chunks)
    if not wrapped:
        return chunks
    # As a bridge wraps a chunk; verl 0.9's own way of it wants a newer Megatron-core.
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=False, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrappers = [
        DistributedDataParallel(config=config, module=chunk, disable_bucketing=number > 0, ddp_config=ddp)
        for number, chunk in enumerate(chunks)
    ]
    _wrapped.extend(wrappers)
    return wrappers


class _ValueHead(nn.Linear):
    """One number a token, as verl's critic has it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, 1, bias=False)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        return super().forward(hidden), None


def fill(chunks: Sequence[nn.Module]) -> None:
    """Weights that make each choice of an expert count; equal where ranks hold copies."""
    with torch.no_grad():
        for number, chunk in enumerate(chunks):
            for name, weight in chunk.named_parameters():
                name = name.replace("module.", "")
                generator = torch.Generator().manual_seed(zlib.crc32(f"{number} {name}".encode()))
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.1 * noise if weight.dim() == 1 else 0.15 * noise)


def other_routers(*models: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Routers that choose otherwise, for the length of the block."""
    each = (
        (zlib.crc32(name.replace("module.", "").encode()), weight)
        for chunks in models
        for chunk in chunks
        for name, weight in chunk.named_parameters()
        if "router.weight" in name
    )
    return changed(each, scale=0.5)


def gradients(chunks: Sequence[nn.Module]) -> list[torch.Tensor]:
    """What the optimizer would be given: Megatron's main gradients."""
    return [weight.main_grad.clone() for chunk in chunks for weight in chunk.parameters()]


# verl's configs and engines


def model_config(tiny: Tiny) -> Any:
    """As much of verl's HFModelConfig as an engine reads."""
    hf = SimpleNamespace(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", tie_word_embeddings=False
    )
    hf.save_pretrained = lambda *_, **__: None
    config = SimpleNamespace(
        tiny=tiny,
        model_type="value_model" if tiny.value else "language_model",
        hf_config=hf,
        architectures=hf.architectures,
        share_embeddings_and_output_weights=False,
        local_path="nowhere",
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
        use_remove_padding=not tiny.padded,
        use_fused_kernels=False,
        lora=SimpleNamespace(get=lambda name, default=None: default),
        get_processor=lambda: None,
    )
    config.get = lambda name, default=None: getattr(config, name, default)
    return config


def engine_config(tiny: Tiny) -> Any:
    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    more = {}
    if PADS_TO_MINI_BATCH:
        more["pad_bshd_to_minibatch_max"] = tiny.padded == "mini"
    return McoreEngineConfig(
        **more,
        use_remove_padding=not tiny.padded,
        tensor_model_parallel_size=tiny.split.tp,
        pipeline_model_parallel_size=tiny.split.pp,
        virtual_pipeline_model_parallel_size=tiny.split.vp if tiny.split.vp > 1 else None,
        context_parallel_size=tiny.split.cp,
        expert_model_parallel_size=tiny.split.ep,
        expert_tensor_parallel_size=tiny.split.etp,
        sequence_parallel=tiny.split.tp > 1,
        use_distributed_optimizer=False,
        use_dist_checkpointing=True,  # of weights too, without a bridge
        forward_only=tiny.forward_only,
        use_dynamic_bsz=tiny.most > 0,
        max_token_len_per_gpu=tiny.most,
        infer_max_token_len_per_gpu=tiny.most,
        micro_batch_size_per_gpu=tiny.micro,
        infer_micro_batch_size_per_gpu=tiny.micro,
        router_replay=EngineRouterReplayConfig(mode=tiny.mode, **tiny.files),
    )


class Adapter:
    """A stand-in of LoRA: a shift of the routers, which is off inside `disable_adapter`."""

    def __init__(self) -> None:
        self.off = 0

    @contextmanager
    def disable_adapter(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        self.off += 1
        with other_routers(chunks):
            yield


def _small(base: type) -> type:
    """verl's engine, but for what needs a bridge."""

    class Small(base):  # type: ignore[misc]
        def optimizer_step(self) -> Any:
            self.gradients.append(gradients(self.module))
            return super().optimizer_step()

        def _build_tf_config(self) -> None:
            tiny = self.model_config.tiny
            self.gradients = []
            self.is_value_model = tiny.value
            self.share_embeddings_and_output_weights = False
            self.param_dtype = torch.float32
            self.bridge = None
            self.provider = None
            self.vanilla_bridge = False
            self.peft_cls = Adapter() if tiny.lora else None
            self.tf_config = transformer_config(tiny)

        def _build_megatron_module(self) -> list[nn.Module]:
            wrapped = not self.engine_config.forward_only
            return chunks_of(self.model_config.tiny, self.tf_config, wrapped=wrapped)

    return Small


def register(language_model: str = "megatron.transformer_impl.MegatronEngineWithLMHead") -> None:
    """Small engines in the place of verl's, for what it takes this machine's device for.

    Args:
        language_model: which of verl's engines an actor gets, by its name below verl.workers.engine.
    """
    from verl.utils.device import get_device_name
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import transformer_impl as impl

    module, _, name = language_model.rpartition(".")
    kinds = {
        "language_model": getattr(importlib.import_module(f"verl.workers.engine.{module}"), name),
        "value_model": impl.MegatronEngineWithValueHead,
    }
    for name, base in kinds.items():
        EngineRegistry._engines[name]["megatron"][get_device_name()] = _small(base)


def optimizer_config() -> Any:
    """Adam, in float32."""
    from verl.workers.config import McoreOptimizerConfig

    return McoreOptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        clip_grad=0.0,  # Megatron clips on CUDA alone
        weight_decay=0.0,
        total_training_steps=10,
        lr_warmup_steps=0,
        # 0.7 and 0.8 know bf16 alone.
        override_optimizer_config={"bf16": False, "params_dtype": torch.float32},
    )


def training_worker(tiny: Tiny) -> Any:
    return training_worker_of(
        model_type="value_model" if tiny.value else "language_model",
        model_config=model_config(tiny),
        engine_config=engine_config(tiny),
        optimizer_config=None if tiny.forward_only else optimizer_config(),
    )


def training_worker_of(**configs: Any) -> Any:
    """verl's TrainingWorker with its engine, as ActorRolloutRefWorker makes it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    config = TrainingWorkerConfig(
        **configs,
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "extra"], load_contents=["model", "extra"]
        ),
    )
    worker = TrainingWorker(config=config)
    worker.flops_counter = SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0))
    worker.reset()
    return worker


class Actor:
    """verl's ActorRolloutRefWorker with an actor and an engine: what a trainer has done by it.

    Attributes:
        chunks: of its model.
        gradients: those of each optimizer step.
        adapter: the stand-in of LoRA.
    """

    def __init__(self, tiny: Any) -> None:
        from verl.workers import config as configs
        from verl.workers.engine_workers import ActorRolloutRefWorker
        from verl.workers.utils.losses import ppo_loss

        self.tiny = tiny
        rollout = {"name": "vllm", "enable_rollout_routing_replay": tiny.mode == "R3"}
        config = OmegaConf.create({"rollout": rollout, **self.config()})
        self.worker = ActorRolloutRefWorker(config=config, role="actor")
        self.worker.actor = self.training()
        loss = getattr(configs, self.loss)(
            rollout_n=1,
            ppo_mini_batch_size=len(LENGTHS),
            ppo_micro_batch_size_per_gpu=tiny.micro,
            use_torch_compile=False,
        )
        self.worker.set_loss_fn(partial(ppo_loss, config=loss))
        self.engine = self.worker.actor.engine
        self.gradients: list[Any] = self.engine.gradients
        self.chunks: Any = self.engine.module
        self.adapter = getattr(self.engine, "peft_cls", None)

    loss = "McoreActorConfig"

    def config(self) -> dict[str, Any]:
        replay = {"router_replay": {"mode": self.tiny.mode}}
        return {"actor": {"strategy": "megatron", "megatron": replay}}

    def training(self) -> Any:
        return training_worker(self.tiny)

    def log_probs(self, data: DataProto) -> tuple[torch.Tensor, Any]:
        """Old log-probs as the trainer keeps them, [samples, RESPONSE] float32, and the routes, if any."""
        from verl.workers.utils.padding import no_padding_2_padding

        output = self.output(self.worker.compute_log_prob(log_prob_batch(data)))
        logs = no_padding_2_padding(output["log_probs"], log_prob_batch(data)).float()
        return logs, output.get("routed_experts")

    def reference(self, data: DataProto) -> tuple[torch.Tensor, list[str]]:
        """The log-probs without the adapter, and the names of all that came with them."""
        output = self.worker.compute_log_prob(without_padding(data, compute_loss=False, no_lora_adapter=True))
        return output["log_probs"].values(), list(output.keys())

    def update(self, data: DataProto, **more: Any) -> dict[str, Any]:
        return dict(self.output(self.worker.update_actor(update_batch(data, **more)))["metrics"])

    def output(self, mine: Any) -> dict[str, Any]:
        """What the driver gets of this data-parallel rank: from the one rank of it that has an output."""
        if mine is not None:
            mine = {name: tu.get(mine, name) for name in mine.keys()}  # noqa: SIM118
        outputs = told_by(self.tiny.split, mine)
        return dict(next(output for output in outputs if output is not None))


def told_by(split: Split, mine: Any) -> list[Any]:
    """What each rank of this data-parallel rank has to say."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (split.ranks["dp"], mine))
    return [message for rank, message in everyones if rank == split.ranks["dp"]]


class LegacyActor:
    """verl 0.7's other worker, megatron_workers over MegatronPPOActor, as init_model leaves it: the same."""

    def __init__(self, tiny: Tiny) -> None:
        from verl.utils.megatron import optimizer as optimizers
        from verl.workers.actor.megatron_actor import MegatronPPOActor
        from verl.workers.megatron_workers import ActorRolloutRefWorker

        self.tiny = tiny
        worker = ActorRolloutRefWorker(config=OmegaConf.create(_legacy_config(tiny)), role="actor")
        worker.tf_config = transformer_config(tiny)
        worker.actor_module = chunks_of(tiny, worker.tf_config, wrapped=True)
        settings = optimizer_config()
        worker.actor_optimizer = optimizers.get_megatron_optimizer(
            model=worker.actor_module,
            config=optimizers.init_megatron_optim_config(settings, use_distributed_optimizer=False),
        )
        worker.actor_optimizer_scheduler = optimizers.get_megatron_optimizer_param_scheduler(
            optimizer=worker.actor_optimizer, config=settings
        )
        worker.peft_cls = self.adapter = Adapter() if tiny.lora else None
        worker.flops_counter = SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0))
        worker.actor = MegatronPPOActor(
            config=worker.config.actor,
            model_config=SimpleNamespace(vocab_size=VOCAB, hidden_size=worker.tf_config.hidden_size),
            hf_config=model_config(tiny).hf_config,
            tf_config=worker.tf_config,
            actor_module=worker.actor_module,
            actor_optimizer=worker.actor_optimizer,
        )
        self.worker = worker
        self.chunks = list(worker.actor_module)
        self.gradients: list[list[torch.Tensor]] = []
        step = worker.actor_optimizer.step

        def stepped() -> Any:
            self.gradients.append(gradients(self.chunks))
            return step()

        worker.actor_optimizer.step = stepped

    def log_probs(self, data: DataProto) -> tuple[torch.Tensor, Any]:
        output = self.worker.compute_log_prob(self._counted(data)).batch
        routes = told_by(self.tiny.split, output.get("routed_experts"))
        assert all(ids is None or torch.equal(routes[0], ids) for ids in routes)
        return output["old_log_probs"], routes[-1]

    def reference(self, data: DataProto) -> tuple[torch.Tensor, list[str]]:
        output = self.worker.compute_ref_log_prob(self._counted(data)).batch
        return output["ref_log_prob"], list(output.keys())

    def update(self, data: DataProto) -> dict[str, Any]:
        output = self.worker.update_actor(self._counted(data))
        reports = told_by(self.tiny.split, (self.tiny.split.ranks["pp"], output.meta_info["metrics"]))
        return dict(next(metrics for stage, metrics in reports if stage == self.tiny.split.pp - 1))

    def _counted(self, data: DataProto) -> DataProto:
        data = DataProto(batch=data.batch.clone(), meta_info=dict(data.meta_info))
        data.meta_info["global_token_num"] = [sum(LENGTHS[number]) for number in mine(self.tiny.split)]
        return data


def _legacy_config(tiny: Tiny) -> dict[str, Any]:
    passes = {
        "log_prob_micro_batch_size_per_gpu": tiny.micro,
        "log_prob_max_token_len_per_gpu": tiny.most,
        "log_prob_use_dynamic_bsz": tiny.most > 0,
    }
    megatron = {
        "seed": 1,
        "tensor_model_parallel_size": tiny.split.tp,
        "context_parallel_size": tiny.split.cp,
        "sequence_parallel": tiny.split.tp > 1,
        "use_remove_padding": True,
    }
    actor = {
        "strategy": "megatron",
        "router_replay": {"mode": tiny.mode},
        "megatron": megatron,
        "ppo_mini_batch_size": len(LENGTHS),
        "ppo_micro_batch_size_per_gpu": tiny.micro,
        "ppo_epochs": 1,
        "ppo_max_token_len_per_gpu": tiny.most,
        "use_dynamic_bsz": tiny.most > 0,
        **dict.fromkeys(("use_kl_loss", "shuffle"), False),
        "data_loader_seed": 1,
        "entropy_coeff": 0.0,
        **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), 0.2),
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "policy_loss": {"loss_mode": "vanilla"},
        "global_batch_info": {},
    }
    rollout = {"name": "vllm", "n": 1, "temperature": 1.0} | passes
    rollout["enable_rollout_routing_replay"] = tiny.mode == "R3"
    return {"actor": actor, "rollout": rollout, "ref": passes}


# Data


def mine(split: Split) -> list[int]:
    """The samples of this data-parallel rank."""
    share_of = len(LENGTHS) // split.dp
    first = split.ranks["dp"] * share_of
    return list(range(first, first + share_of))


def batch(
    tiny: Any,
    routes: Sequence[torch.Tensor] | None = None,
    tokens_of: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> DataProto:
    """This rank's samples as the trainer has them: prompts padded on the left, responses on the right.

    `routes` are those of each of them, [tokens, layers, topk]; `tokens_of` the tokens of all samples.
    """
    numbers = mine(tiny.split)
    samples = [(tokens_of or tiny.samples())[number] for number in numbers]
    prompts = torch.stack([pad(prompt, (PROMPT - len(prompt), 0)) for prompt, _ in samples])
    responses = torch.stack([pad(response, (0, RESPONSE - len(response))) for _, response in samples])
    tokens = torch.cat([prompts, responses], dim=1)
    attention = (tokens > 0).long()  # no token is 0
    answered = (responses > 0).long()
    tensors = {
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "prompts": prompts,
        "responses": responses,
        "response_mask": answered,
        "advantages": answered * (1.0 - 0.5 * (torch.tensor(numbers)[:, None] % 4)),
    }
    if routes is not None:
        around = [(0, 0, 0, 0, PROMPT - len(prompt), RESPONSE - len(answer)) for prompt, answer in samples]
        tensors["routed_experts"] = torch.stack([pad(*each) for each in zip(routes, around, strict=True)])
    return DataProto.from_single_dict(tensors, meta_info={"temperature": 1.0})


@contextmanager
def delivered(tiny: Any) -> Iterator[Callable[[DataProto], DataProto]]:
    """Makes of a batch what verl's trainer has where a rollout put its routes away; each is read once. Ranks
    with the same samples have the same references."""
    layers = [layer for layer, moe in enumerate(tiny.moe) if moe]
    model = RoutedModel(layers=tuple(layers), num_layers=len(tiny.moe), num_experts=EXPERTS, topk=TOPK)
    putter = r3_store.Putter(FileCarrier(Path(mkdtemp()), cut=2), model, keeps=False)
    put = list[Any]()

    def by_reference(data: DataProto) -> DataProto:
        whole = data.batch.pop("routed_experts")
        kept = data.batch["attention_mask"].bool()
        marks = torch.zeros(*whole.shape[:2], 1, 1, dtype=torch.int16)
        references = []
        for number, mask in enumerate(kept):
            tokens = data.batch["input_ids"][number][mask].numpy()
            sample, reference = putter.put(whole[number][mask].numpy(), tokens, 0)
            marks[number, mask] = torch.from_numpy(sample)
            references.append(reference)
        data.batch["routed_experts"] = marks
        shared = told_by(tiny.split, references)[0]
        put.extend(shared)
        data.non_tensor_batch[COLUMN] = np.array([*shared, None], dtype=object)[:-1]
        return data

    with mock.patch.object(r3_store, "fetch_each", wraps=r3_store.fetch_each) as fetch_each:
        yield by_reference
    assert sum(len(call.args[0]) for call in fetch_each.call_args_list) == len(put) > 0


def without_padding(data: DataProto, **more: Any) -> TensorDict:
    """As the trainer hands a batch to its workers, by verl's own functions."""
    from verl.workers.utils.padding import left_right_2_no_padding

    tensordict = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(tensordict, **more)
    return tensordict


def log_prob_batch(data: DataProto) -> TensorDict:
    return without_padding(data, calculate_entropy=True, compute_loss=False)


def update_batch(data: DataProto, **more: Any) -> TensorDict:
    size = len(LENGTHS)
    settings = {"global_batch_size": size, "mini_batch_size": size, "epochs": 1, "seed": 1} | more
    loader = {"shuffle": False}
    return without_padding(
        data, calculate_entropy=False, dataloader_kwargs=loader, compute_loss=True, **settings
    )


def unpadded(routes: torch.Tensor, data: DataProto) -> list[torch.Tensor]:
    """The routes of each sample, as a release gives them: jagged, or padded."""
    if routes.is_nested:
        return list(routes.unbind())
    kept = data.batch["attention_mask"].bool()
    return [ids[mask] for ids, mask in zip(routes, kept, strict=True)]


# Where a token sits


def rows(numbers: Sequence[int], split: Split) -> list[tuple[int, int] | None]:
    """The token (sample, position) in each row of this rank's routers for one packed micro-batch."""
    align = split.tp * split.cp * (2 if split.cp > 1 else 1)
    tokens: list[tuple[int, int] | None] = []
    for number in numbers:
        length = sum(LENGTHS[number])
        padded = -(-length // align) * align
        here = share(padded, split.cp, split.ranks["cp"])
        tokens += [(number, position) if position < length else None for position in here]
    part = len(tokens) // split.tp
    return tokens[split.ranks["tp"] * part : (split.ranks["tp"] + 1) * part]


def rollout_routes(tiny: Tiny) -> list[torch.Tensor]:
    """What a rollout engine hands over of this rank's samples: a column a layer, zeros for dense ones.

    The last token has none, and neither have two in the middle of each longer response, which a tool wrote.
    """
    routes = []
    for number in mine(tiny.split):
        length = sum(LENGTHS[number])
        generator = torch.Generator().manual_seed(100 + number)
        ids = torch.rand(length, len(tiny.moe), EXPERTS, generator=generator).topk(TOPK).indices
        ids[-1] = 0
        ids[:, [layer for layer, sparse in enumerate(tiny.moe) if not sparse]] = 0
        if LENGTHS[number][1] > 6:
            ids[LENGTHS[number][0] + 2 : LENGTHS[number][0] + 4] = 0
        routes.append(ids.to(torch.uint8))
    return routes


def packing() -> tuple[Any, ...]:
    """verl's NPU functions for packing, which are plain torch, where flash-attn isn't installed."""
    plain = importlib.import_module("verl.utils.npu_flash_attn_utils")
    return tuple(
        getattr(plain, name) for name in ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    )


def prepare(*, engines: bool = True) -> None:
    """Lend what this machine lacks, and put the small engines in their place, if wanted."""
    # verl before 0.9 offloads to memory that only a machine with a device can pin.
    torch.Tensor.pin_memory = lambda self, *_: self.clone()  # type: ignore[method-assign]
    importlib.import_module("verl.utils.attention_utils")._get_attention_functions = packing
    # verl logs how much memory a device has; 0.9 takes a machine without one for one with CUDA.
    torch.cuda.mem_get_info = lambda *_: (0, 0)  # type: ignore[assignment]
    for name in (
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("empty_cache", "reset_peak_memory_stats"),
    ):
        for device in (torch.cuda, torch.cpu):
            setattr(device, name, lambda *_: 0)
    if engines:
        register()
