"""verl's own FSDP engine and workers on a small Qwen3-MoE, with what this machine lacks lent; the rest is
verl's and transformers' as released.

The model and what its routers did are those of qwen_sharded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from on_verl import engine_job
from on_verl.engine_job import LENGTHS
from zoo.gpt_split import Split
from zoo.qwen_sharded import MOE, block_of, routers, whole

FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What a job's config says of its model, its cut and its passes."""

    folder: str
    """Of the model's weights."""
    mode: str = "R2"
    sp: int = 1
    packed: bool = True
    moe: tuple[int, ...] = MOE
    micro: int = 2
    most: int = 0
    """Tokens of a micro-batch, where its size is dynamic."""
    recompute: bool = False
    lora: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    """Further settings of the engine."""
    files: dict[str, str] = field(default_factory=dict)

    @property
    def split(self) -> Split:
        """The cut, with this rank's place."""
        return Split(cp=self.sp, ranks={"dp": dist.get_rank() // self.sp, "cp": dist.get_rank() % self.sp})

    @staticmethod
    def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The prompt and the response of all samples: 1, 2, 3 and so on."""
        lengths = [length for pair in LENGTHS for length in pair]
        numbers = torch.arange(1, 1 + sum(lengths)).split(lengths)
        return list(zip(numbers[::2], numbers[1::2], strict=True))


# verl's block for an NPU


def use_block_for_an_npu() -> None:
    """For the rest of this process: verl's own, over the operators of tests/stubs.

    These alone: the device that the stub lends would be in FSDP's way.
    """
    for name in ("torch_npu.on_cpu", "torch_npu"):
        file = "operators" if name == "torch_npu" else "on_cpu"
        spec = spec_from_file_location(name, Path(__file__).parents[1] / f"stubs/torch_npu/{file}.py")
        sys.modules[name] = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(sys.modules[name])  # type: ignore[union-attr]
    sys.modules["torch_npu.on_cpu"].lend_histogram()
    module = importlib.import_module("verl.models.transformers.npu_patch")
    if hasattr(module, "apply_npu_patches"):  # from 0.9 on; before, the import is the patch
        module.apply_npu_patches()


# verl's configs and engines


class Actor(engine_job.Actor):
    """The same with an FSDP engine; `gradients` are whole, by name."""

    loss = "FSDPActorConfig"

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(tiny)
        self.model: nn.Module = self.engine.module
        if transformers.__version__ < "5":
            for router in routers(self.model).values():
                block_of(self.model, router).register_forward_hook(_with_idle_experts)

    def config(self) -> dict[str, Any]:
        tiny: Tiny = self.tiny
        fsdp = {} if tiny.mode == "disabled" else {"router_replay": {"mode": tiny.mode} | tiny.files}
        return {
            "actor": {"strategy": "fsdp2", "fsdp_config": fsdp},
            "model": {"use_remove_padding": tiny.packed},
        }

    def training(self) -> Any:
        from verl.workers import config

        tiny: Tiny = self.tiny
        return engine_job.training_worker_of(
            model_type="language_model",
            model_config=config.HFModelConfig(
                path=tiny.folder,
                load_tokenizer=False,
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=tiny.recompute,
                use_remove_padding=tiny.packed,
                lora_rank=tiny.lora,
            ),
            # As Hydra makes it of the user's line: the settings of the replay are a plain dict.
            engine_config=config.FSDPEngineConfig(
                strategy="fsdp2",
                ulysses_sequence_parallel_size=tiny.sp,
                use_dynamic_bsz=tiny.most > 0,
                max_token_len_per_gpu=tiny.most,
                infer_max_token_len_per_gpu=tiny.most,
                micro_batch_size_per_gpu=tiny.micro,
                infer_micro_batch_size_per_gpu=tiny.micro,
                use_torch_compile=False,
                mixed_precision=FLOAT32,
                router_replay={"mode": tiny.mode} | tiny.files,
                **tiny.engine,
            ),
            optimizer_config=config.FSDPOptimizerConfig(
                lr=1e-3, weight_decay=0.0, clip_grad=1e9, total_training_steps=10, lr_warmup_steps=0
            ),
        )


def _with_idle_experts(block: Any, _: Any, output: Any) -> Any:
    """transformers 4's block leaves out experts without a token. Then ranks reduce gradients of other sizes,
    and FSDP2 over gloo ends the process, with replay and without."""
    nothing = sum(weight.sum() for weight in block.experts.parameters()) * 0
    return (output[0] + nothing.to(output[0].dtype), *output[1:])


def _noting(base: type) -> type:
    """verl's engine, which keeps the gradients that its optimizer is given."""

    class Noting(base):  # type: ignore[misc]
        def initialize(self) -> None:
            self.gradients: list[dict[str, torch.Tensor]] = []
            super().initialize()

        def optimizer_step(self) -> Any:
            self.gradients.append(whole_gradients(self.module))
            return super().optimizer_step()

    return Noting


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}


# Data


def by_token(tiny: Any, routes: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Of this rank's routes, [tokens, layers, topk] a sample: those of each token, by its id."""
    tokens = [torch.cat(tiny.samples()[number]).tolist() for number in engine_job.mine(tiny.split)]
    return {
        token: row
        for ids, rows in zip(tokens, routes, strict=True)
        for token, row in zip(ids, rows.long(), strict=True)
    }


def prepare() -> None:
    """Lend what this machine lacks, and have verl take its engine for a CPU."""
    from verl.utils import device

    if not hasattr(device, "get_platform"):
        _lend_device(device)
    engine_job.prepare(engines=False)
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl as impl

    for strategy in ("fsdp", "fsdp2"):
        kinds = EngineRegistry._engines["language_model"][strategy]
        kinds[device.get_device_name()] = _noting(impl.FSDPEngineWithLMHead)


def _lend_device(device: Any) -> None:
    """verl before 0.9 has no platforms: it takes a machine without CUDA for one with an NPU, or a CPU."""
    for module in [
        device,
        *(imported for name, imported in list(sys.modules.items()) if name.startswith("verl.")),
    ]:
        for name, value in (("get_device_id", lambda: "cpu"), ("get_torch_device", lambda: torch.cpu)):
            if hasattr(module, name):
                setattr(module, name, value)
