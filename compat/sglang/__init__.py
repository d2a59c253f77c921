"""Reads SGLang's answers, and knows what its releases can't do."""

from typing import TYPE_CHECKING

from npu_replay import lazy

if TYPE_CHECKING:
    from npu_replay.compat.sglang.decode import from_sglang
    from npu_replay.compat.sglang.engine_plan import engine_arguments, request_arguments

_HOMES = {"engine_arguments": "engine_plan", "from_sglang": "decode", "request_arguments": "engine_plan"}
__all__ = ["engine_arguments", "from_sglang", "request_arguments"]

if not TYPE_CHECKING:  # with __getattr__ a type checker would accept any name
    __getattr__, __dir__ = lazy.names(__name__, _HOMES)
