"""vllm-ascend: which release hands out which routes, and captures where it hands out none."""

from typing import TYPE_CHECKING

from npu_replay import lazy

if TYPE_CHECKING:
    from npu_replay.compat.vllm_ascend.releases import Setting, check

_HOMES = {"Setting": "releases", "check": "releases"}
__all__ = ["Setting", "check"]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy.names(__name__, _HOMES)
