"""Make a worker return a step's rows after all ranks' are merged.

Asks:     the capturer, by which of three methods it returns rows.
Changes:  that method, `clear_buffer`, and the runner's `execute_model`; where rows go by slots of another KV
          cache group than the runner keeps, its `_build_attention_metadata`.
Undone:   with the group of patches that `install` is given.

to 0.20.2         save_captured_experts(slots)             with slots that fill up a graph
0.22.1 to 0.29    get_device_buffer()                      the slots of KV cache group 0
0.28 on, V2       get_routed_experts(slots, tokens)        nothing clears the buffer
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.vllm_ascend import parts
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.errors import ReplayError

_SAVE, _BUFFER, _SNAPSHOT = parts.WAYS_OUT


class ReadOut:
    """Begins and finishes the capture of each step of a worker's model runner."""

    def __init__(self, runner: Any, capturer: Any, capture: Capture) -> None:
        self._runner = runner
        self._capturer = capturer
        self._capture = capture
        self._group = getattr(runner, "routed_experts_attn_gid", getattr(capturer, "attn_gid", 0))
        self._groups = runner.kv_cache_config.kv_cache_groups
        self._block = self._groups[self._group].kv_cache_spec.block_size
        self._positions: list[int] | None = None

    def install(self, patches: Patches) -> None:
        """Wrap both ends of a step, by whichever of the known methods the capturer has."""
        around: dict[str, Any] = {_SAVE: self._save, _BUFFER: self._hand_out, _SNAPSHOT: self._snapshot}
        ways_out = [name for name in parts.WAYS_OUT if hasattr(self._capturer, name)]
        if _SAVE in ways_out and len(self._groups) > 1:
            kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in self._groups)
            raise ReplayError(
                "this model's routes are kept under slots of a group that may give its blocks back",
                where="vllm-ascend",
                expected="one KV cache group; from vLLM 0.22 on, several",
                got=f"{len(self._groups)} groups: {kinds}",
                cause="sliding windows or linear attention beside full attention (vllm-ascend#8216). With "
                "windows alone, disable_hybrid_kv_cache_manager=True makes one group",
            )
        patches.wrap(self._runner, "execute_model", self._begin, "begins with no row of the step before")
        for name in ways_out:
            patches.wrap(self._capturer, name, around[name], "puts all ranks' rows together")
        if hasattr(self._capturer, "clear_buffer"):
            patches.set(self._capturer, "clear_buffer", self._capture.clear, "a row that nobody writes shows")
        if self._group and hasattr(self._runner, "routed_experts_slot_mapping_device"):
            why = "slots of the group that has attention's, where the runner keeps those of group 0"
            patches.wrap(self._runner, "_build_attention_metadata", self._mend_slots, why)

    def _begin(self, original: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("dummy_run"):
            self._capture.begin(scheduled.total_num_scheduled_tokens)
            # A late scheduler doesn't know yet which drafts of the last step were rejected.
            drafts = getattr(self._runner, "speculative_config", None) is not None
            late = getattr(self._runner.scheduler_config, "async_scheduling", False)
            known = self._capture.check.ground < 0 and not (drafts and late)
            self._positions = positions(scheduled) if known else None
        return original(scheduled, *args, **kwargs)

    def _save(self, original: Callable[..., Any], indices: Any) -> None:
        slots = indices[: self._capture.scheduled]  # the rest is -1, which would index the last slot
        self._finish(torch.as_tensor(slots))
        original(slots)

    def _hand_out(self, original: Callable[..., Any]) -> Any:
        self._finish(getattr(self._runner, "routed_experts_slot_mapping_device", None))
        return original()

    def _snapshot(self, original: Callable[..., Any], slot_mappings: Any, num_tokens: int) -> Any:
        if num_tokens < self._capture.scheduled:  # vLLM may drop drafts
            self._capture.scheduled = num_tokens
            self._positions = None
        self._finish(slot_mappings[self._group])
        return original(slot_mappings, num_tokens)

    def _finish(self, slots: torch.Tensor | None) -> None:
        capture = self._capture
        expected = self._positions
        self._positions = None
        if slots is None or expected is None:
            capture.finish()
        else:
            own = slots[: capture.scheduled]
            capture.finish(functools.partial(capture.check.slots, own, expected, self._block))

    def _mend_slots(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        tokens = self._capture.scheduled
        slots = self._runner.input_batch.block_table[self._group].slot_mapping.gpu[:tokens]
        self._runner.routed_experts_slot_mapping_device[:tokens].copy_(slots)
        return made


def positions(scheduled: Any) -> list[int]:
    """Return the positions of a step's tokens in their sequences, in any order."""
    cached = scheduled.scheduled_cached_reqs
    tokens = scheduled.num_scheduled_tokens
    begun = [(request.req_id, request.num_computed_tokens) for request in scheduled.scheduled_new_reqs]
    begun += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [first + token for name, first in begun for token in range(tokens[name])]
