"""The capture, broken as a change of it might break it: its check of the first steps finds each. Then classes
of vllm-ascend and vLLM as a later release might change them: a start is refused that isn't known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from npu_replay.compat.vllm_ascend import capture
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.capture_points import CapturePoints
from npu_replay.compat.vllm_ascend.placing import Place, place


def ranks_in_the_wrong_order() -> None:
    capture.place = lambda layout, rows: place(
        replace(layout, tp_rank=layout.tp_size - 1 - layout.tp_rank), rows
    )


def each_ranks_part_taken_for_the_whole() -> None:
    capture.place = lambda layout, rows: Place(0, rows, 0)


def nothing_put_together() -> None:
    # The merge alone: the check's own sums stay.
    of_torch = {"all_reduce": staticmethod(lambda *_, **__: None), "ReduceOp": dist.ReduceOp}
    capture.dist = type("dist", (), of_torch)


def rows_of_earlier_steps() -> None:
    Capture.clear = lambda self: None


def a_layer_that_never_ends() -> None:
    """So the draft's choice, which comes next, is taken for its."""

    def in_layer(self: CapturePoints, number: int) -> Any:
        def run(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._layer = number
            return original(*args, **kwargs)

        return run

    CapturePoints._in_layer = in_layer


def the_second_ranks_order_is_another() -> None:
    """Not the capture is broken here: a sum's last bit differs from rank to rank, so near experts change
    places."""
    take = CapturePoints._take

    def turned(self: CapturePoints, layer: int, ids: Any, *rest: Any) -> None:
        take(self, layer, ids.flip(-1) if self._tp.rank_in_group else ids, *rest)

    CapturePoints._take = turned


# ---- classes as another release might have them


def a_context_without_the_way() -> None:
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX

    kind = type(_EXTRA_CTX)
    kind.extra_attrs = tuple(name for name in kind.extra_attrs if name != "moe_comm_type")


def a_capturer_that_hands_rows_out_otherwise() -> None:
    """As that of vLLM 0.31 and later, which the AuxOutput connector asks."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer

    for name in ("save_captured_experts", "get_device_buffer", "get_routed_experts"):
        if hasattr(RoutedExpertsCapturer, name):
            delattr(RoutedExpertsCapturer, name)
    RoutedExpertsCapturer.snapshot_routing_data = lambda self, num_tokens: None


def layers_that_choose_otherwise() -> None:
    from npu_replay.compat.vllm_ascend import parts

    if parts.by_router():
        from vllm_ascend.ops.fused_moe.routed_experts import AscendRoutedExperts

        del AscendRoutedExperts._select_experts
    else:
        from vllm_ascend.ops.fused_moe import experts_selector

        experts_selector.select_experts = lambda hidden_states, gate, top_k: None
