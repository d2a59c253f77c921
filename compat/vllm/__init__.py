"""Reads vLLM's answers, and knows what its releases can't do."""

from typing import TYPE_CHECKING

from npu_replay import lazy

if TYPE_CHECKING:
    from npu_replay.compat.vllm.decode import from_vllm
    from npu_replay.compat.vllm.engine_plan import engine_arguments

_HOMES = {"engine_arguments": "engine_plan", "from_vllm": "decode"}
__all__ = ["engine_arguments", "from_vllm"]

if not TYPE_CHECKING:  # with __getattr__ a type checker would accept any name
    __getattr__, __dir__ = lazy.names(__name__, _HOMES)
