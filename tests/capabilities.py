"""What docs/dev/matrix.md has a row for, and how an untouched release is asked whether it has it by itself.

A test of tests/matrix/ says by `@pytest.mark.capability("name")` what it shows. npu_replay is never imported
here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

MOE = "megatron.core.transformer.moe"
REPLAY = f"{MOE}.router_replay"


@dataclass(frozen=True)
class Capability:
    """A row."""

    says: str
    """What a user of the release can do, as the page shows it."""
    is_native: Callable[[], bool] = lambda: False
    """Asks the release on the path, in a process that has never seen npu_replay. By default none has it."""


def _has(module: str, *names: str) -> Callable[[], bool]:
    """Are these there? A name may lead into a class: `TopKRouter.is_aux_loss_enabled`."""

    def ask() -> bool:
        if find_spec(module) is None:
            return False
        return all(_reach(import_module(module), name) is not None for name in names)

    return ask


def _reach(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _takes(module: str, function: str, argument: str) -> Callable[[], bool]:
    def ask() -> bool:
        target = _reach(import_module(module), function)
        return target is not None and argument in inspect.signature(target).parameters

    return ask


def _flag(name: str) -> Callable[[], bool]:
    def ask() -> bool:
        config = import_module("megatron.core.transformer.transformer_config")
        classes = (config.TransformerConfig, config.MLATransformerConfig)
        return all(name in {field.name for field in dataclasses.fields(cls)} for cls in classes)

    return ask


def _counts_without_padding() -> bool:
    """Runs the router's own counting on three tokens, the last of them padding, and two experts."""
    import torch

    if not _takes(f"{MOE}.router", "TopKRouter.routing", "padding_mask")():
        return False
    torch._dynamo.config.disable = True  # it may be compiled, which takes long
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
    routing_map = torch.tensor([[True, False], [False, True], [False, True]])
    count = import_module(f"{MOE}.router").TopKRouter._apply_expert_bias
    try:
        count(router, routing_map, padding_mask=torch.tensor([False, False, True]))
    except RuntimeError:  # the mask can't be broadcast at all
        return False
    return bool(router.local_tokens_per_expert.tolist() == [1, 1])


CAPABILITIES: Mapping[str, Mapping[str, Capability]] = {
    "megatron": {
        "blocks": Capability("`npu_replay.record` and `replay`, fifteen ways of routing"),
        "recompute": Capability("... with recompute, thirteen ways to checkpoint"),
        "order": Capability("... and several micro-batches, backward in any order"),
        "sinkhorn": Capability("... with sinkhorn routing"),
        "force_balance": Capability("... with `moe_router_force_load_balancing`"),
        "quantile": Capability("... with quantile balancing"),
        "fused": Capability("... with the fused router, `moe_router_fusion`"),
        "hybrid": Capability("`HybridModel` (`MambaModel`): record, replay, recompute and an engine's rows"),
        "flag": Capability(
            "`moe_enable_routing_replay` on `TransformerConfig`, `MLATransformerConfig`",
            _flag("moe_enable_routing_replay"),
        ),
        "alias": Capability("`enable_routing_replay` on both", _flag("enable_routing_replay")),
        "module": Capability(
            "`RouterReplay`, `RouterReplayAction`", _has(REPLAY, "RouterReplay", "RouterReplayAction")
        ),
        "layer_number": Capability(
            "`RouterReplay.layer_number`",
            lambda: _has(REPLAY)() and hasattr(import_module(REPLAY).RouterReplay(), "layer_number"),
        ),
        "router_replay": Capability(
            "`TopKRouter.router_replay`, by the flag",
            lambda: "router_replay" in import_module(f"{MOE}.router").TopKRouter.__init__.__code__.co_names,
        ),
        "topk_function": Capability(
            "`topk_routing_with_score_function(router_replay=)`",
            _takes(f"{MOE}.moe_utils", "topk_routing_with_score_function", "router_replay"),
        ),
        "upstream_model": Capability(
            "a whole model recorded and replayed by `RouterReplay` alone, recompute by REPLAY_BACKWARD",
            _has(REPLAY, "RouterReplay"),
        ),
        "upstream_fused": Capability("... with the fused router"),
        "vp_stages": Capability(
            "`is_vp_first_stage`, `is_vp_last_stage`",
            _has("megatron.core.pipeline_parallel.utils", "is_vp_first_stage", "is_vp_last_stage"),
        ),
        "fusion_flag": Capability("`config.moe_router_fusion`", _flag("moe_router_fusion")),
        "padding_mask": Capability(
            "`padding_mask` through record and replay",
            _takes(f"{MOE}.router", "TopKRouter.routing", "padding_mask"),
        ),
        "bias_mask": Capability("`padding_mask` in the counts of the expert bias", _counts_without_padding),
        "aux_loss": Capability("one policy for the aux loss while replaying"),
        "report": Capability("`report()` names every change, `uninstall()` undoes all"),
    },
    "transformers": {
        "qwen3_moe": Capability("Qwen3-MoE recorded and replayed"),
        "mixtral": Capability("Mixtral recorded and replayed"),
        "deepseek_v3": Capability("DeepSeek-V3 (groups, expert bias) recorded and replayed"),
        "checkpointing": Capability("... each with `gradient_checkpointing_enable`"),
        "families": Capability("every family does what [models.md](../models.md) says"),
    },
}


def natives(task: Mapping[str, Any]) -> dict[str, bool]:
    """For a process of tests/jobs.py: what the untouched release of this "product" has by itself."""
    return {name: capability.is_native() for name, capability in CAPABILITIES[task["product"]].items()}
