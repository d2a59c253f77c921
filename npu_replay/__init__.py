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
    from npu_replay import compat as compat
except ImportError as error:
    raise ImportError(
        f"npu_replay/compat in {__path__[0]} is no folder. In a clone it is a symbolic link to ../compat: "
        "copy compat/ too, and unpack an archive with tar or unzip, which keep links (Python's zipfile "
        "doesn't); or install the wheel"
    ) from error
from npu_replay import lazy, routers as routers
from npu_replay.compat.patching.install import begin, install as install, uninstall as uninstall
from npu_replay.errors import (
    InvalidRoutes as InvalidRoutes,
    MicroBatchError as MicroBatchError,
    NoEffect as NoEffect,
    RecomputeError as RecomputeError,
    ReplayError as ReplayError,
    RouteFileError as RouteFileError,
    RouterError as RouterError,
)
from npu_replay.parallel.parallel_layout import ParallelLayout as ParallelLayout, register_reader
from npu_replay.routes.fingerprint import fingerprint as fingerprint  # not lazy: its module has the same name

if TYPE_CHECKING:
    from npu_replay import delivery as delivery
    from npu_replay.compat.sglang.decode import from_sglang as from_sglang
    from npu_replay.compat.vllm.decode import from_vllm as from_vllm
    from npu_replay.doctor.report import report as report
    from npu_replay.parallel.collect import collect as collect
    from npu_replay.parallel.parallel_layout import DecoderLayers as DecoderLayers
    from npu_replay.parallel.token_layout import TokenLayout as TokenLayout
    from npu_replay.rollout.model_config import RoutedModel as RoutedModel
    from npu_replay.rollout.turns import Rollout as Rollout, Turn as Turn
    from npu_replay.routes.mismatch import compare as compare
    from npu_replay.routes.routed_experts import RoutedExperts as RoutedExperts
    from npu_replay.routes.store import RouteStore as RouteStore
    from npu_replay.following.follow import Following as Following, follow as follow
    from npu_replay.sessions.observe import Observation as Observation, observe as observe
    from npu_replay.sessions.record import (
        Pinning as Pinning,
        Recording as Recording,
        pin_recompute as pin_recompute,
        record as record,
    )
    from npu_replay.sessions.replay import Replay as Replay, replay as replay

__version__ = "0.1.0"


if not TYPE_CHECKING:  # with __getattr__ a type checker accepts any name
    __getattr__, __dir__, __all__ = lazy.names(__name__)

routers.register("megatron-core", lazy.lazy("npu_replay.compat.megatron.routers:MegatronRouters"))
routers.register("transformers", lazy.lazy("npu_replay.compat.transformers:TransformersRouters"))
register_reader("megatron-core", lazy.lazy("npu_replay.compat.megatron.parallel_state:read"))
begin()
