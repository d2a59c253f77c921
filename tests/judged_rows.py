"""Rows that a trainer has to take or to refuse, made of a model's own; shared by the tests of overlap."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

import npu_replay
from npu_replay import MicroBatchError, RoutedExperts
from npu_replay.routes.routed_experts import narrow_dtype

RUN = 64


def rounded(model: Any, bits: int, group: int = 16) -> Any:
    """The model with so many bits a weight from now on, as W8A16 and W4A16 have them.

    Each group of a row has a scale and a zero point. Embeddings and routers stay as they are.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or any(
                word in name for word in ("embed", "gate.weight", "router", "lm_head")
            ):
                continue
            parts = weight.reshape(
                *weight.shape[:-1], -1, group if weight.shape[-1] % group == 0 else weight.shape[-1]
            )
            least = parts.amin(-1, keepdim=True)
            step = ((parts.amax(-1, keepdim=True) - least) / (2**bits - 1)).clamp_min(1e-12)
            weight.copy_((((parts - least) / step).round() * step + least).reshape(weight.shape))
    return model


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "shifted by 1": lambda ids, _: ids.roll(1, 0),
    "shifted by -3": lambda ids, _: ids.roll(-3, 0),
    "another sample": lambda _, other: other,
    "two halves of two samples": lambda ids, other: torch.cat([ids[: len(ids) // 2], other[len(ids) // 2 :]]),
    "a stale tail of 64": lambda ids, other: torch.cat([ids[:-RUN], other[-RUN:]]),
    "all layers rolled": lambda ids, _: ids.roll(1, 1),
    "two layers swapped": lambda ids, _: ids[:, [0, 2, 1, *range(3, ids.shape[1])]],
    "a layer copied": lambda ids, _: ids[:, [*range(ids.shape[1] - 1), -2]],
}
"""Each makes wrong rows of right ones and those of another sample, [rows, layers, topk]."""


def of_engine(ids: torch.Tensor, like: RoutedExperts) -> RoutedExperts:
    """Routes as a decoder makes them: of these ids, in the layers of others."""
    return like.with_rows(ids.to(narrow_dtype(like.num_experts)), like.recorded, from_engine=True)


def verdict(call: Callable[[], Any], model: Any, routes: RoutedExperts, **options: Any) -> float | str:
    """The overlap of routes that a replay has taken, or why it refused them."""
    try:
        with torch.no_grad(), npu_replay.replay(model, [routes], **options) as session:
            call()
    except MicroBatchError as error:
        return str(error)
    return session.metrics()["overlap"]


def check(
    call: Callable[[], Any], model: Any, right: dict[str, RoutedExperts], other: RoutedExperts
) -> list[str]:
    """Hold that right routes are taken and wrong ones refused; return a row of a table for each.

    Args:
        call: one forward.
        right: what that call would choose, rounded in several ways; wrong rows are made of the first.
        other: the routes of another sample.
    """
    table = []
    for name, routes in right.items():
        outcome = verdict(call, model, of_engine(routes.ids, routes))
        assert isinstance(outcome, float), f"right rows, {name}: {outcome}"
        table.append(f"| {name} | {outcome:.3f} | taken |")
    own = next(iter(right.values()))
    for name, make in WRONG.items():
        outcome = verdict(call, model, of_engine(make(own.ids.clone(), other.ids), own))
        assert "far from what the routers would choose" in str(outcome), f"rows {name}: overlap {outcome}"
        if "shifted" in name:
            assert f"moved by {-int(name.rpartition(' ')[2]):+}" in outcome or " layer" in outcome
        lowest = re.search(r"got (\d\.\d+)", str(outcome))
        table.append(f"| {name} | {lowest and lowest[1]} | refused |")
    return table
