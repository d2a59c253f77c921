"""verl's Megatron engine on a CPU: Megatron's local layers, and what it sees written down, pass by pass."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import npu_replay
from npu_replay.compat.verl.batch_routes import keys_in, references_in, rows_of
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.smoke import megatron_model
from verl_live import tiny
from zoo import qwen

TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"
NOTES = "VERL_LIVE_NOTES"
"""The variable with the folder of the notes."""


def register(impl: Any) -> None:
    """The engine for verl's device "cpu", which verl has none for.

    Args:
        impl: verl.workers.engine.megatron.transformer_impl, just imported.
    """
    from verl.workers.engine import EngineRegistry

    class OnCPU(impl.MegatronEngineWithLMHead):
        """Notes what its routers showed in each pass, and which weights it hands out."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._lent = npu_replay.compat.cpu.lend()
            self._lent.__enter__()  # for good: this process does nothing else
            _lend_optimizer()
            torch.Tensor.type = _type_on_cuda
            _register_bridge()
            self._numbers = itertools.count()
            super().__init__(*args, **kwargs)

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
            with npu_replay.observe(self.module) as seen:
                output = super().forward_backward_batch(data, loss_function, forward_only)
            self._note(
                kind="log-probs" if forward_only else "update",
                tokens=[ids.clone() for ids in data["input_ids"].unbind()],
                routes=_routes_in(self, data),
                shown=[(micro_batch.ids, micro_batch.layers) for micro_batch in seen.shown],
            )
            return output

        def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
            weights, lora = super().get_per_tensor_param(*args, **kwargs)
            kept = {name: weight.detach().clone() for name, weight in weights}
            self._note(kind="weights", weights=kept)
            return iter(kept.items()), lora

        def _note(self, **what: Any) -> None:
            torch.save(what, Path(os.environ[NOTES]) / f"{next(self._numbers):03}.pt")

    EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")(OnCPU)


def _routes_in(engine: Any, data: Any) -> list[torch.Tensor]:
    """Routes of each sample of a batch, [tokens, layers, topk]; where it has references, what was fetched."""
    rows = data["routed_experts"]
    references = references_in(data)
    if references is None:
        return [sample.clone() for sample in rows.unbind()]
    model = npu_replay.RoutedModel(
        layers=tuple(range(tiny.LAYERS)),
        num_layers=tiny.LAYERS,
        num_experts=qwen.EXPERTS,
        topk=qwen.TOPK,
    )
    store = EngineAdapter.of(engine).routes
    keys = zip(keys_in(rows, references), rows.unbind(), strict=True)
    return [store.of_sample(rows_of(key, len(sample)), None, model).ids for key, sample in keys]


def _lend_optimizer() -> None:
    """Megatron 0.12 asks Transformer Engine to quantize its FP8 weights, of which there are none."""
    from megatron.core.optimizer import distrib_optimizer

    def none_to_quantize(model_params: Any, *_: Any) -> None:
        assert not model_params

    distrib_optimizer.quantize_param_shard = none_to_quantize


def _type_on_cuda(self: torch.Tensor, *args: Any, _type: Any = torch.Tensor.type, **kwargs: Any) -> Any:
    """Megatron's optimizer for bfloat16 goes by the names of CUDA's tensors."""
    name = _type(self, *args, **kwargs)
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


def _register_bridge() -> None:
    """mbridge's Qwen3-MoE with Megatron's local layers, where it takes Transformer Engine's."""
    # mbridge imports its vision models first, and these Transformer Engine's layers.
    sys.modules[TRANSFORMER_ENGINE] = mock.MagicMock()
    importlib.import_module("verl.models.mcore.mbridge")
    del sys.modules[TRANSFORMER_ENGINE]
    from mbridge.core import register_model
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    from zoo.gpt_split import Attention, Norm

    @register_model("qwen3_moe")
    class LocalLayers(Qwen3MoEBridge):
        def _model_provider(self, post_model_creation_callbacks: Any) -> Any:
            def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
                return megatron_model.model(
                    self.config,
                    vocab=self.hf_config.vocab_size,
                    length=self.hf_config.max_position_embeddings,
                    rotary_base=int(self.hf_config.rope_theta),
                    norm=Norm,
                    attention=Attention,
                    pre_process=pre_process,
                    post_process=post_process,
                )

            return provider

        def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
            name = re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.weight)", r"\2\1", name)
            name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
            names: list[str] = super()._weight_name_mapping_mcore_to_hf(name)
            return names
