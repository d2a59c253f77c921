"""Routing replay for mixture-of-experts reinforcement learning.

    with npu_replay.record(model) as recording:        # R2: the old log-probs
        forward_backward_func(..., forward_only=True)
    with npu_replay.replay(model, recording.routes):   # the update
        forward_backward_func(...)

Importing this imports no framework.
"""

from npu_replay import torch_loading  # isort: skip # noqa: F401  first: it keeps torch without torch_npu
from npu_replay import compat
from npu_replay.collecting import collect
from npu_replay.compat.sglang import from_sglang
from npu_replay.compat.vllm import from_vllm
from npu_replay.decoder_layers import DecoderLayers
from npu_replay.errors import ReplayError
from npu_replay.fingerprint import fingerprint
from npu_replay.installing import install, uninstall
from npu_replay.layout import TokenLayout
from npu_replay.mismatch import compare
from npu_replay.observing import observe
from npu_replay.parallel_layout import ParallelLayout, register_reader
from npu_replay.pinning import pin_recompute
from npu_replay.recording import record
from npu_replay.replaying import replay
from npu_replay.reporting import report
from npu_replay.rollout import Rollout, Turn
from npu_replay.route_store import RouteStore
from npu_replay.routed_experts import RoutedExperts
from npu_replay.routed_model import RoutedModel
from npu_replay.routers import register

__version__ = "0.1.0"

__all__ = [
    "DecoderLayers",
    "ParallelLayout",
    "ReplayError",
    "Rollout",
    "RouteStore",
    "RoutedExperts",
    "RoutedModel",
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
    "uninstall",
]

register("megatron-core", compat.megatron.MegatronRouters())
register("transformers", compat.transformers.TransformersRouters())
register_reader("megatron-core", compat.megatron_layout.read)
install()
