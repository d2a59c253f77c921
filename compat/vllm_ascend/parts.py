"""Checks that vllm-ascend and its vLLM have the parts by which npu_replay captures.

What is there decides, not the release: an image is built from a branch, whose version may say anything, and a
final release may differ from its candidates.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from npu_replay.compat import probe
from npu_replay.compat.patching import known_names
from npu_replay.errors import ReplayError

CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
_BY_ROUTER = "vllm_ascend.ops.fused_moe.routed_experts"
_PRODUCT = "vllm-ascend"

_Needed = dict[str, dict[str, tuple[str, ...]]]

_ALWAYS: _Needed = {
    "vllm.distributed": {"get_tp_group": ()},
    "vllm.forward_context": {"get_forward_context": ()},
    CAPTURER: {"RoutedExpertsCapturer.capture": ("layer_id", "topk_ids")},
    "vllm_ascend.ascend_forward_context": {"_EXTRA_CTX": ()},
    "vllm_ascend.ops.fused_moe.moe_comm_method": {
        "MoECommMethod.prepare": ("self", "hidden_states", "router_logits", "replace_allreduce")
    },
}
_ROUTERS: _Needed = {
    "vllm.model_executor.layers.fused_moe.router.base_router": {"BaseRouter.set_capture_fn": ()},
    _BY_ROUTER: {"AscendRoutedExperts._select_experts": ("hidden_states", "router_logits")},
}
_SELECTS: _Needed = {
    "vllm_ascend.ops.fused_moe.experts_selector": {
        "select_experts": (
            *("hidden_states", "router_logits", "top_k", "topk_group", "num_expert_group"),
            *("custom_routing_function", "scoring_func", "e_score_correction_bias"),
        )
    },
}
"""The parts that are used, by module: each function with the arguments that are read, in their order."""
_CONTEXT = ("moe_comm_type", "num_tokens", "in_profile_run")
"""The attributes of a step's context that are read."""
WAYS_OUT = {
    "save_captured_experts": ("indices",),
    "get_device_buffer": ("self",),
    "get_routed_experts": ("slot_mappings", "num_tokens"),
}
"""The methods of vLLM's capturer that return rows, with their arguments; one of them has to be there."""


def by_router() -> bool:
    """Return whether layers choose by vLLM's routers, which call its capturer; else by `select_experts`."""
    return probe.find(_BY_ROUTER) is not None


def check(release: str) -> None:
    """Raise a ReplayError that names the first part which is missing; `release` is for its words."""
    what = f"{_PRODUCT} {release}"
    for name, needed in (_ALWAYS | (_ROUTERS if by_router() else _SELECTS)).items():
        known_names.check(_imported(name, what, needed), needed, what, _PRODUCT)
    context = importlib.import_module("vllm_ascend.ascend_forward_context")._EXTRA_CTX
    had = getattr(context, "extra_attrs", ())
    missing = [name for name in _CONTEXT if name not in had]
    if missing:
        raise known_names.unknown(
            what, context.__class__.__module__, f"_EXTRA_CTX.{missing[0]}", "none there", _PRODUCT
        )
    module = importlib.import_module(CAPTURER)
    ways_out = [name for name in WAYS_OUT if hasattr(module.RoutedExpertsCapturer, name)]
    if not ways_out:
        raise known_names.unknown(
            what,
            module.__name__,
            "RoutedExpertsCapturer with one of " + ", ".join(WAYS_OUT),
            "none of them",
            _PRODUCT,
        )
    needed = {f"RoutedExpertsCapturer.{name}": WAYS_OUT[name] for name in ways_out}
    known_names.check(module, needed, what, _PRODUCT)


def _imported(name: str, what: str, needed: dict[str, tuple[str, ...]]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise known_names.unknown(
            what, name, next(iter(needed)), f"no module {error.name}", _PRODUCT
        ) from error


def missing_module(*names: str) -> ReplayError | None:
    """Return the error for modules of which none is there, loaded or to be found; None if one is."""
    if any(name in sys.modules or probe.find(name) is not None for name in names):
        return None
    where = names[0].partition(".")[0]
    return known_names.unknown(_PRODUCT, where, " or ".join(names), "no such module", where)
