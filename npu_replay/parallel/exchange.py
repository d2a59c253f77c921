"""Routes that one rank of a group has and another one needs: each moves once, from the one to the other."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from npu_replay.parallel.rank_failures import PATIENCE, Circle, Outcome
from npu_replay.routes.routed_experts import RoutedExperts


def exchange(
    held: Mapping[int, RoutedExperts], lacking: Sequence[int], group: Any, *, patience: float = PATIENCE
) -> dict[int, RoutedExperts]:
    """What this rank lacks and another one holds, by key. Every rank of the group has to call it.

    Args:
        held: what this rank can send.
        lacking: the keys that it wants; those that nobody holds are left out of what comes back.
        group: the process group.
        patience: seconds to wait for ranks that come later than this one.

    Raises:
        ReplayError: a rank didn't come, failed, or is gone.
    """
    cause = "a rank that failed before, or another number of updates on it"
    circle = Circle(group, patience, "not all ranks came to exchange routes", cause)
    outcome = Outcome()
    asked = outcome.agree(circle, sorted(set(lacking)))
    wanted = {key for keys in asked for key in keys} & held.keys()
    sent = outcome.attempt(lambda: {key: pickle.dumps(held[key]) for key in wanted}) or {}
    offered = outcome.agree(circle, {key: len(data) for key, data in sent.items()})
    if outcome.error is not None:
        raise outcome.error
    came: dict[int, RoutedExperts] = {}
    for target, keys in enumerate(asked):  # in the same order on all ranks, so each finds its partner
        for key in keys:
            source = next((rank for rank, sizes in enumerate(offered) if key in sizes), None)
            if source == circle.me:
                data = torch.frombuffer(bytearray(sent[key]), dtype=torch.uint8).to(circle.device)
                circle.run(lambda: dist.isend(data, circle.ranks[target], group))  # noqa: B023  run at once
            elif source is not None and target == circle.me:
                data = torch.empty(offered[source][key], dtype=torch.uint8, device=circle.device)
                circle.run(lambda: dist.irecv(data, circle.ranks[source], group))  # noqa: B023
                came[key] = pickle.loads(data.cpu().numpy().data)
    return came
