"""Routing replay for mixture-of-experts reinforcement learning.

    with npu_replay.record(model) as recording:        # R2: the old log-probs
        forward_backward_func(..., forward_only=True)
    with npu_replay.replay(model, recording.routes):   # the update
        forward_backward_func(...)

Importing this imports no framework, and of npu_replay itself little: most names come with their first use.
"""

from npu_replay import beside, torch_loading  # isort: skip # noqa: F401  first: they find compat, keep torch
from importlib import import_module
from typing import TYPE_CHECKING, Any

from npu_replay import compat, routers
from npu_replay.errors import (
    InvalidRoutes,
    MicroBatchError,
    NoEffect,
    RecomputeError,
    ReplayError,
    RouteFileError,
    RouterError,
)
from npu_replay.fingerprint import fingerprint  # now: imported later, its module would take its name
from npu_replay.installing import install, uninstall
from npu_replay.later import later
from npu_replay.parallel_layout import ParallelLayout, register_reader

if TYPE_CHECKING:
    from npu_replay.collecting import collect
    from npu_replay.compat.sglang import from_sglang
    from npu_replay.compat.vllm import from_vllm
    from npu_replay.decoder_layers import DecoderLayers
    from npu_replay.layout import TokenLayout
    from npu_replay.mismatch import compare
    from npu_replay.observing import Observation, observe
    from npu_replay.pinning import Pinning, pin_recompute
    from npu_replay.recording import Recording, record
    from npu_replay.replaying import Replay, replay
    from npu_replay.reporting import report
    from npu_replay.rollout import Rollout, Turn
    from npu_replay.route_store import RouteStore
    from npu_replay.routed_experts import RoutedExperts
    from npu_replay.routed_model import RoutedModel

__version__ = "0.1.0"

__all__ = [
    "DecoderLayers",
    "InvalidRoutes",
    "MicroBatchError",
    "NoEffect",
    "Observation",
    "ParallelLayout",
    "Pinning",
    "RecomputeError",
    "Recording",
    "Replay",
    "ReplayError",
    "Rollout",
    "RouteFileError",
    "RouteStore",
    "RoutedExperts",
    "RoutedModel",
    "RouterError",
    "TokenLayout",
    "Turn",
    "collect",
    "compare",
    "compat",
    "fingerprint",
    "from_sglang",
    "from_vllm",
    "install",
    "observe",
    "pin_recompute",
    "record",
    "replay",
    "report",
    "routers",
    "uninstall",
]

_HOMES = {
    "DecoderLayers": "decoder_layers",
    "Observation": "observing",
    "Pinning": "pinning",
    "Recording": "recording",
    "Replay": "replaying",
    "Rollout": "rollout",
    "RouteStore": "route_store",
    "RoutedExperts": "routed_experts",
    "RoutedModel": "routed_model",
    "TokenLayout": "layout",
    "Turn": "rollout",
    "collect": "collecting",
    "compare": "mismatch",
    "from_sglang": "compat.sglang",
    "from_vllm": "compat.vllm",
    "observe": "observing",
    "pin_recompute": "pinning",
    "record": "recording",
    "replay": "replaying",
    "report": "reporting",
}
"""The module of each name that comes with its first use."""

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted(globals().keys() | _HOMES.keys())


routers.register("megatron-core", later("npu_replay.compat.megatron:MegatronRouters"))
routers.register("transformers", later("npu_replay.compat.transformers:TransformersRouters"))
register_reader("megatron-core", later("npu_replay.compat.megatron_layout:read"))
install()
