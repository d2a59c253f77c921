"""A worker: real configs, groups over gloo, real layers and a real runner object; then a case's steps."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.fused_moe import routed_experts_capturer

import npu_replay
from npu_replay.compat.vllm_ascend import plugin
from on_vllm_ascend import cases, kernels, read_out
from on_vllm_ascend.cases import BLOCK, EXPERTS, GROUPS, HIDDEN, LAYERS, TOP_GROUPS, TOP_K, Case

MAX_TOKENS = 64
BLOCKS = 8
DRAFT = 99
"""The layer whose logits a draft model draws."""


def runner_class() -> Any:
    """The one that hands out routes: of the V2 runner where vLLM has `bind_routed_experts_capturer`."""
    if hasattr(routed_experts_capturer, "bind_routed_experts_capturer"):
        from vllm_ascend.worker.v2 import model_runner
    else:
        from vllm_ascend.worker import model_runner_v1 as model_runner
    return model_runner.NPUModelRunner


class Worker:
    def __init__(self, case: Case, rank: int, ports: list[int]) -> None:
        self.case = case
        self.dp_rank, self.tp_rank = divmod(rank, case.tp)
        os.environ["VLLM_ASCEND_ENABLE_FLASHCOMM1"] = str(int(case.sequence_parallel))
        os.environ["DYNAMIC_EPLB"] = str(case.eplb).lower()
        self.config = vllm_config(case, self.dp_rank, ports)
        self.start(ports[0])
        self.runner = make_runner(self.config, self.model)
        self.road: Any = None
        self.capture: Any = None

    def start(self, port: int) -> None:
        """As NPUWorker does it, with gloo for hccl."""
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm_ascend import utils
        from vllm_ascend.ascend_config import get_ascend_config, init_ascend_config
        from vllm_ascend.ascend_forward_context import set_mc2_mask, set_mc2_tokens_capacity
        from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

        if self.case.scheme:
            self.config.quant_config = quantized(self.case.scheme, self.case.device)
        init_ascend_config(self.config)
        with set_current_vllm_config(self.config):
            address = f"tcp://127.0.0.1:{port}"
            init_distributed_environment(self.case.tp, self.tp_rank, address, self.tp_rank, "gloo")
            ensure_model_parallel_initialized(self.case.tp, 1)
            init_ascend_model_parallel(self.config.parallel_config)
            utils.register_ascend_customop(self.config)
            if hasattr(utils, "set_weight_prefetch_method"):
                utils.set_weight_prefetch_method(get_ascend_config().weight_prefetch_config)
            set_mc2_tokens_capacity(self.config, MAX_TOKENS, 1)
            set_mc2_mask(self.config, "cpu")
            self.model = Model(self.case, "model", range(self.case.dense, LAYERS))
            self.draft = Model(self.case, "mtp", [0]) if self.case.draft else None

    def run(self) -> dict[str, int]:
        """How many tokens' rows came back right, and how many layers the check has held against logits."""
        before = current_functions()
        for _ in range(1 + self.case.kv_cache_twice):
            self.make_capturer()
        self.road = read_out.road(self.runner)
        counts = {"right": 0, "of": 0}
        for step, tokens in enumerate(self.case.steps):
            own = tokens[self.dp_rank]
            self.runner.body = lambda step=step, tokens=tokens: self.execute(step, tokens)
            self.runner.execute_model(scheduled(own, self.road.done))
            rows = self.road.after(own, self.case.padding)
            if self.tp_rank == 0:
                counts["right"] += self.right(rows, self.truth(step, own))
                counts["of"] += own
        self.road.close()
        counts |= {"compared": len(self.capture.check._compared), "moved": sum(kernels.moved)}
        self.take_back(before)
        return counts if self.tp_rank == 0 else {}

    def make_capturer(self) -> None:
        """As `initialize_kv_cache` does; what captures is kept, for the life of this process."""
        attach = plugin.attach

        def kept(runner: Any) -> Any:
            self.capture = attach(runner)
            return self.capture

        plugin.attach = kept
        self.runner.init_routed_experts_capturer()

    def take_back(self, before: dict[str, Any]) -> None:
        assert current_functions() != before
        npu_replay.uninstall()
        assert current_functions() == before
        assert "execute_model" not in vars(self.runner)
        capturer = getattr(self.runner, "routed_experts_capturer", None) or self.road.capturer
        assert not [name for name, value in vars(capturer).items() if callable(value)]

    def right(self, rows: Any, expected: Any) -> int:
        """How many rows are right once `from_vllm` has read them, of a request of these tokens alone."""
        from vllm.outputs import CompletionOutput, RequestOutput

        completion = CompletionOutput(0, "", [1], None, None, finish_reason="length")
        completion.routed_experts = rows
        prompt = list(range(1, len(rows) + 1))
        output = RequestOutput("one", None, prompt, None, [completion], True)
        (routes,) = npu_replay.from_vllm(output, self.config.model_config.hf_text_config)
        ids = np.sort(routes.ids.numpy()[: len(rows)], axis=-1)
        return int((ids == expected).all(axis=(1, 2)).sum())

    def execute(self, step: int, tokens: tuple[int, ...]) -> None:
        """What of `execute_model` has to do with routes."""
        self.road.before()
        self.forward(self.model, step, tokens)
        if self.draft is not None:
            self.forward(self.draft, step, tokens)

    def truth(self, step: int, tokens: int) -> Any:
        """tokens x layers with experts x k."""
        return np.stack(
            [
                cases.chosen(self.case.routing, cases.logits(step, layer, self.dp_rank, tokens), layer)
                for layer in range(self.case.dense, LAYERS)
            ],
            axis=1,
        )

    def forward(self, model: Model, step: int, tokens: tuple[int, ...]) -> None:
        from vllm.forward_context import set_forward_context
        from vllm_ascend import ascend_forward_context as context

        tokens = tuple(number + self.case.padding for number in tokens)
        own = tokens[self.dp_rank]
        context.select_moe_comm_method = lambda *_, **__: context.MoECommType[self.case.comm]
        across = torch.tensor(tokens, dtype=torch.int32) if self.case.dp > 1 else None
        counts = {"num_tokens": own, "num_tokens_across_dp": across}
        if getattr(self.config, "use_v2_model_runner", False):
            around = set_forward_context(None, self.config, **counts)
        else:
            around = context.set_ascend_forward_context(None, self.config, model_instance=model, **counts)
        with around, kernels.packed_weights():
            for layer, experts in model.experts():
                drawn = cases.logits(step, DRAFT if model is self.draft else layer, self.dp_rank, own)
                logits = self.part(torch.from_numpy(drawn), getattr(context._EXTRA_CTX, "pad_size", 0) or 0)
                experts(torch.ones(len(logits), HIDDEN), logits)

    def part(self, rows: torch.Tensor, missing: int) -> torch.Tensor:
        """With sequence parallelism a rank is given its part of the tokens, filled up to equal parts."""
        if not self.case.sequence_parallel:
            return rows
        missing += -(len(rows) + missing) % self.case.tp
        return torch.nn.functional.pad(rows, (0, 0, 0, missing)).chunk(self.case.tp)[self.tp_rank]


def current_functions() -> dict[str, Any]:
    """What the plug-in replaces for a whole worker, as it is."""
    from vllm_ascend.ops.fused_moe.moe_comm_method import MoECommMethod

    modules = {name: getattr(module, "__dict__", {}) for name, module in list(sys.modules.items())}
    return {
        **{name: own["select_experts"] for name, own in modules.items() if "select_experts" in own},
        "prepare": MoECommMethod.prepare,
        "capture": routed_experts_capturer.RoutedExpertsCapturer.capture,
    }


def scheduled(tokens: int, done: int) -> Any:
    """What the scheduler says of a step of the one request."""
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"one": tokens},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["one"], num_computed_tokens=[done]),
    )


class Model(torch.nn.Module):
    """Only what routes of a model: its layers of experts, where they hang in vLLM's models."""

    def __init__(self, case: Case, name: str, layers: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(max(layers) + 1))
        for layer in layers:
            self.layers[layer].mlp = torch.nn.Module()
            self.layers[layer].mlp.experts = experts_of(case, layer, f"{name}.layers.{layer}.mlp.experts")

    def experts(self) -> list[tuple[int, Any]]:
        return [
            (index, layer.mlp.experts) for index, layer in enumerate(self.layers) if hasattr(layer, "mlp")
        ]


def experts_of(case: Case, layer: int, prefix: str) -> Any:
    """By vLLM's own name for it, for which vllm-ascend has put its own class."""
    from vllm.model_executor.layers import fused_moe

    routing: dict[str, Any] = {}
    if case.routing != "softmax":
        routing = {
            "use_grouped_topk": True,
            "num_expert_group": GROUPS,
            "topk_group": TOP_GROUPS,
            "scoring_func": "sigmoid",
            "e_score_correction_bias": torch.nn.Parameter(
                torch.from_numpy(cases.bias(layer)), requires_grad=False
            ),
        }
    kind = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    if case.sequence_parallel and kind is not getattr(fused_moe, "FusedMoE", None):
        routing["is_sequence_parallel"] = True
    if case.mix_placement:
        routing["n_shared_experts"] = 1
    if case.overlap_gate:
        kind = getattr(fused_moe, "SharedFusedMoE", kind)
        routing["shared_experts"] = torch.nn.Identity()
    return kind(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        renormalize=True,
        prefix=prefix,
        quant_config=quantized(case.scheme, case.device) if case.scheme else None,
        **routing,
    )


def quantized(scheme: str, device: str) -> Any:
    """A checkpoint's description in which every layer of experts has this scheme."""
    from vllm_ascend.quantization.method_adapters import AscendFusedMoEMethod

    twin = "_310p." if device == "_310P" else ""
    get_scheme_class = importlib.import_module(
        f"vllm_ascend.{twin}quantization.methods.registry"
    ).get_scheme_class

    place = (
        "configs.modelslim_config" if find_spec("vllm_ascend.quantization.configs") else "modelslim_config"
    )
    description = importlib.import_module(f"vllm_ascend.quantization.{place}").AscendModelSlimConfig
    name, _, kind = scheme.partition("/")
    scheme_class = get_scheme_class(name, kind or "moe")
    assert scheme_class is not None, f"{scheme}: no such scheme"

    class OneScheme(description):  # type: ignore[misc, valid-type]
        def get_quant_method(self, layer: Any, prefix: str, tid2eid: Any = None) -> Any:
            may = {"quant_config": self, "weight_block_size": [32, 32], "moe_config": layer.moe_config}
            asked = inspect.signature(scheme_class).parameters
            made = scheme_class(**{name: value for name, value in may.items() if name in asked})
            return AscendFusedMoEMethod(made, layer.moe_config)

    # In groups, or from 0.30 on for one scheme by channel.
    per_channel = name == "W4A8_DYNAMIC" and place.startswith("configs")
    return OneScheme({"group_size": 0 if per_channel else 32, "version": "1.0.0"})


def make_runner(config: Any, model: Model) -> Any:
    """A real runner without its __init__, which allocates on a device.

    It has what a runner has when `initialize_kv_cache` calls `init_routed_experts_capturer`: weights are
    loaded, no graph is captured. A plug-in shouldn't ask for more, and more isn't there. Its `execute_model`
    runs the step of this rig, where the real one prepares inputs and attention too.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    runner = object.__new__(type("Runner", (runner_class(),), {"execute_model": lambda self, _: self.body()}))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    attributes = {
        "vllm_config": config,
        "model_config": config.model_config,
        "scheduler_config": config.scheduler_config,
        "parallel_config": config.parallel_config,
        "compilation_config": config.compilation_config,
        "cache_config": config.cache_config,
        "speculative_config": config.speculative_config,
        "model": model,
        "kv_cache_config": KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)]),
        "device": torch.device("cpu"),
        "pin_memory": False,
        "max_num_tokens": MAX_TOKENS,
        "routed_experts_initialized": False,
        "use_async_scheduling": False,
        "dp_size": config.parallel_config.data_parallel_size,
        "dp_rank": config.parallel_config.data_parallel_rank,
    }
    for name, value in attributes.items():
        setattr(runner, name, value)
    return runner


MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "moe_intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}


def vllm_config(case: Case, dp_rank: int, ports: list[int]) -> Any:
    """What `vllm serve` would make of this case: a model of Qwen3-MoE's kind."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # or half a minute goes by
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps({**MODEL, "mlp_only_layers": list(range(case.dense))}))
    model = ModelConfig(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_TOKENS,
        enable_return_routed_experts=True,
    )
    parallel = ParallelConfig(
        tensor_parallel_size=case.tp,
        data_parallel_size=case.dp,
        data_parallel_rank=dp_rank,
        data_parallel_master_ip="127.0.0.1",
        enable_expert_parallel=True,
    )
    # Each draws its own, if it isn't told.
    parallel.data_parallel_master_port = ports[0]
    parallel._data_parallel_master_port_list = ports[1:]
    scheduler = SchedulerConfig(
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=8,
        max_model_len=MAX_TOKENS,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    return VllmConfig(
        model_config=model,
        parallel_config=parallel,
        scheduler_config=scheduler,
        cache_config=CacheConfig(block_size=BLOCK),
        device_config=DeviceConfig(device="cpu"),
        additional_config=additional_config(case),
    )


def additional_config(case: Case) -> dict[str, Any]:
    switches = {
        "enable_flashcomm1": case.sequence_parallel,
        "mix_placement": case.mix_placement,
        "multistream_overlap_gate": case.overlap_gate,
    }
    # Newer releases refuse a key that they don't know, whatever its value.
    config: dict[str, Any] = {name: True for name, is_on in switches.items() if is_on}
    if case.eplb:
        config["eplb_config"] = {"dynamic_eplb": True, "num_redundant_experts": case.world}
    return config
