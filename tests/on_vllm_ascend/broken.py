"""The capture, broken as a change of it might break it. Its check of the first steps finds each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from npu_replay.compat.vllm_ascend import capture, plugin
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.placing import Layout, Place, place
from npu_replay.compat.vllm_ascend.seams import Seam
from npu_replay.compat.vllm_ascend.self_check import SelfCheck


def ranks_in_the_wrong_order() -> None:
    _place(lambda layout, rows: place(replace(layout, tp_rank=layout.tp_size - 1 - layout.tp_rank), rows))


def each_ranks_part_taken_for_the_whole() -> None:
    _place(lambda layout, rows: Place(0, rows, 0))


def rows_one_too_far() -> None:
    def further(layout: Layout, rows: int) -> Place:
        found = place(layout, rows)
        return found._replace(row=found.row + 1)

    _place(further)


def nothing_put_together() -> None:
    _reduce(lambda *_, **__: None)


def summed_instead() -> None:
    _reduce(lambda rows, op, group: all_reduce(rows, dist.ReduceOp.SUM, group=group))


def rows_of_earlier_steps() -> None:
    Capture.clear = lambda self: None


def rows_of_earlier_steps_after_the_check() -> None:
    """Not found: it is what the clear of each step is for."""
    rows_of_earlier_steps()
    plugin.SelfCheck = functools.partial(SelfCheck, steps=0)


def a_layer_that_never_ends() -> None:
    """So the draft's choice, which comes next, is taken for its."""

    def in_layer(self: Seam, number: int) -> Any:
        def run(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._layer = number
            return original(*args, **kwargs)

        return run

    Seam._in_layer = in_layer


all_reduce = dist.all_reduce


def the_second_ranks_order_is_another() -> None:
    """Not the capture is broken here: a sum's last bit differs from rank to rank, so near experts change
    places."""
    take = Seam._take

    def turned(self: Seam, layer: int, ids: Any, *rest: Any) -> None:
        take(self, layer, ids.flip(-1) if self._tp.rank_in_group else ids, *rest)

    Seam._take = turned


def _place(other: Callable[[Layout, int], Place]) -> None:
    capture.place = other


def _reduce(other: Callable[..., None]) -> None:
    """The merge alone: the check's own sums stay."""
    of_torch = {"all_reduce": staticmethod(other), "ReduceOp": dist.ReduceOp}
    capture.dist = type("dist", (), of_torch)
