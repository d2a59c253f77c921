"""How a worker hands out a step's rows, release by release: what runs before, and what before that.

to 0.20.2         save_captured_experts(slots)             with slots that fill up a graph
0.22.1 to 0.29    get_device_buffer()                      the slots of KV cache group 0
0.28 on, V2       get_routed_experts(slots, tokens)        nothing clears the buffer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.errors import ReplayError

_NAMES = ("save_captured_experts", "get_device_buffer", "get_routed_experts")


def install(patches: Patches, runner: Any, capturer: Any, capture: Capture) -> None:
    """Have each step begun and finished.

    Args:
        runner: the worker's model runner.
        capturer: vLLM's.

    Raises:
        ReplayError: the capturer has no way out that is known.
    """

    def begin(original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("dummy_run"):
            capture.begin(scheduler_output.total_num_scheduled_tokens)
        return original(scheduler_output, *args, **kwargs)

    def finish(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        capture.finish()
        return original(*args, **kwargs)

    def save(original: Callable[..., Any], indices: Any) -> None:
        capture.finish()
        original(indices[: capture.scheduled])  # the rest is -1, which is the last slot of the cache

    found = [name for name in _NAMES if hasattr(capturer, name)]
    if not found:
        raise ReplayError(
            "this capturer hands out its rows in a way that isn't known",
            where=f"{type(capturer).__module__}.{type(capturer).__qualname__}",
            expected=f"one of {', '.join(_NAMES)}",
            got="none of them",
            cause="vLLM isn't of the release that this vllm-ascend is made for",
        )
    patches.wrap(runner, "execute_model", begin, "a step begins with no row of the one before")
    for name in found:
        patches.wrap(capturer, name, save if name == _NAMES[0] else finish, "puts all ranks' rows together")
    if hasattr(capturer, "clear_buffer"):
        patches.set(capturer, "clear_buffer", capture.clear, "a row that nobody writes shows")
    group = getattr(runner, "routed_experts_attn_gid", 0)
    if group and hasattr(runner, "routed_experts_slot_mapping_device"):
        _mend_slots(patches, runner, capture, group)


def _mend_slots(patches: Patches, runner: Any, capture: Capture, group: int) -> None:
    """The slots of attention's KV cache group, where Ascend's V1 runner keeps those of group 0."""

    def after(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        tokens = capture.scheduled
        slots = runner.input_batch.block_table[group].slot_mapping.gpu[:tokens]
        runner.routed_experts_slot_mapping_device[:tokens].copy_(slots)
        return made

    patches.wrap(runner, "_build_attention_metadata", after, "slots of the group that has attention's")
