"""Routing replay for mixture-of-experts reinforcement learning.

    with npu_replay.record(model) as recording:        # R2: the old log-probs
        forward_backward_func(..., forward_only=True)
    with npu_replay.replay(model, recording.routes):   # the update
        forward_backward_func(...)

Importing this imports no framework and little of npu_replay: most names are loaded on their first use.
"""

from npu_replay import torch_loading  # isort: skip # noqa: F401  first: it keeps torch
from typing import TYPE_CHECKING

try:
    from npu_replay import compat
except ImportError as error:
    raise ImportError(
        f"npu_replay/compat in {__path__[0]} is no folder. In a clone it is a symbolic link to ../compat: "
        "copy compat/ too, and unpack an archive with tar or unzip, which keep links (Python's zipfile "
        "doesn't); or install the wheel"
    ) from error
from npu_replay import lazy, routers
from npu_replay.compat.patching.install import begin, install, uninstall
from npu_replay.errors import (
    InvalidRoutes,
    MicroBatchError,
    NoEffect,
    RecomputeError,
    ReplayError,
    RouteFileError,
    RouterError,
)
from npu_replay.parallel.parallel_layout import ParallelLayout, register_reader
from npu_replay.routes.fingerprint import fingerprint  # not lazy: its module has the same name

if TYPE_CHECKING:
    from npu_replay import delivery
    from npu_replay.compat.sglang.decode import from_sglang
    from npu_replay.compat.vllm.decode import from_vllm
    from npu_replay.doctor.report import report
    from npu_replay.parallel.collect import collect
    from npu_replay.parallel.parallel_layout import DecoderLayers
    from npu_replay.parallel.token_layout import TokenLayout
    from npu_replay.rollout.model_config import RoutedModel
    from npu_replay.rollout.turns import Rollout, Turn
    from npu_replay.routes.mismatch import compare
    from npu_replay.routes.routed_experts import RoutedExperts
    from npu_replay.routes.store import RouteStore
    from npu_replay.sessions.follow import Following, follow
    from npu_replay.sessions.observe import Observation, observe
    from npu_replay.sessions.record import Pinning, Recording, pin_recompute, record
    from npu_replay.sessions.replay import Replay, replay

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "DecoderLayers", "Following", "InvalidRoutes", "MicroBatchError", "NoEffect", "Observation",
    "ParallelLayout", "Pinning", "RecomputeError", "Recording", "Replay", "ReplayError", "Rollout",
    "RouteFileError", "RouteStore", "RoutedExperts", "RoutedModel", "RouterError", "TokenLayout", "Turn",
    "collect", "compare", "compat", "delivery", "fingerprint", "follow", "from_sglang", "from_vllm",
    "install", "observe", "pin_recompute", "record", "replay", "report", "routers", "uninstall",
]
# fmt: on

_HOMES = {
    "DecoderLayers": "parallel.parallel_layout",
    "Following": "sessions.follow",
    "Observation": "sessions.observe",
    "Pinning": "sessions.record",
    "Recording": "sessions.record",
    "Replay": "sessions.replay",
    "Rollout": "rollout.turns",
    "RouteStore": "routes.store",
    "RoutedExperts": "routes.routed_experts",
    "RoutedModel": "rollout.model_config",
    "TokenLayout": "parallel.token_layout",
    "Turn": "rollout.turns",
    "collect": "parallel.collect",
    "delivery": "delivery",
    "compare": "routes.mismatch",
    "follow": "sessions.follow",
    "from_sglang": "compat.sglang.decode",
    "from_vllm": "compat.vllm.decode",
    "observe": "sessions.observe",
    "pin_recompute": "sessions.record",
    "record": "sessions.record",
    "replay": "sessions.replay",
    "report": "doctor.report",
}
"""Maps each lazily loaded name to its module."""

if not TYPE_CHECKING:  # with __getattr__ a type checker accepts any name
    __getattr__, __dir__ = lazy.names(__name__, _HOMES)

routers.register("megatron-core", lazy.lazy("npu_replay.compat.megatron.routers:MegatronRouters"))
routers.register("transformers", lazy.lazy("npu_replay.compat.transformers:TransformersRouters"))
register_reader("megatron-core", lazy.lazy("npu_replay.compat.megatron.parallel_state:read"))
begin()
