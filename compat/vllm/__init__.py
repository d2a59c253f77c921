"""Reads vLLM's answers, and knows what its releases can't do."""

from typing import TYPE_CHECKING

from npu_replay import lazy

if TYPE_CHECKING:
    from npu_replay.compat.vllm.decode import from_vllm as from_vllm
    from npu_replay.compat.vllm.engine_plan import engine_arguments as engine_arguments


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy.names(__name__)
