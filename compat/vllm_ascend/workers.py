"""Every worker of an engine captures, or the engine doesn't start.

The engine's process asks them, once their KV caches are there: it has the plug-in, and they may run on other
nodes. One that lacks npu_replay, or the variable, hands out what its release has: zeros, or from 0.28 on rows
of an earlier step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_replay.errors import ReplayError


def without(executor: Any, captures: Callable[[Any], bool]) -> ReplayError | None:
    """Why this engine's rows would be another's; None where each worker captures.

    Args:
        executor: vLLM's, whose workers are there.
        captures: asked in each worker, with the worker; found there by its module and name.
    """
    try:
        told = executor.collective_rpc(captures)
    except Exception as error:  # noqa: BLE001  where npu_replay can't be imported, vLLM says so in its own words
        got = f"{type(error).__name__}: {error}"
    else:
        ranks = [rank for rank, one in enumerate(told) if not one]
        if not ranks:
            return None
        got = f"none on worker {', '.join(map(str, ranks))} of {len(told)}"
    return ReplayError(
        "not every worker of this engine captures",
        where="vllm-ascend",
        expected="npu_replay, its variable and its name in VLLM_PLUGINS, where that is set, on every node",
        got=got,
        cause="a node on which npu_replay isn't installed, or that has another environment",
    )
