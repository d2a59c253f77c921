"""Sends routes from the rank of a group that has them to each rank that needs them, once."""

from __future__ import annotations

import pickle
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from npu_replay.parallel.rank_failures import PATIENCE, Outcome, RankGroup
from npu_replay.routes.routed_experts import RoutedExperts


class _Move(NamedTuple):
    key: int
    source: int
    target: int


def exchange(
    held: Mapping[int, RoutedExperts], lacking: Sequence[int], group: Any, *, patience: float = PATIENCE
) -> dict[int, RoutedExperts]:
    """Return the routes that this rank lacks and another one holds, by key; every rank must call it.

    Keys that no rank holds are left out. Raises ReplayError on all ranks if one fails, or doesn't come within
    `patience` seconds.
    """
    cause = "a rank that failed before, or another number of updates on it"
    peers = RankGroup(group, patience, "not all ranks came to exchange routes", cause)
    outcome = Outcome()
    asked = outcome.agree(peers, sorted(set(lacking)))
    offered = outcome.agree(peers, held.keys() & {key for keys in asked for key in keys})
    holder = {key: rank for rank in reversed(range(len(offered))) for key in offered[rank]}  # the first
    wanted = ((key, target) for target, keys in enumerate(asked) for key in keys if key in holder)
    moves = [_Move(key, holder[key], target) for key, target in wanted if peers.me in (holder[key], target)]
    sent = {move.key for move in moves if move.source == peers.me}
    data = outcome.attempt(lambda: {key: bytearray(pickle.dumps(held[key])) for key in sent}) or {}
    sizes = ChainMap(*outcome.agree(peers, {key: len(one) for key, one in data.items()}))
    # All memory is allocated before the first message: a rank that failed between two would hang the others.
    room = outcome.attempt(lambda: _room({move.key: sizes[move.key] for move in moves}, peers.device))
    outcome.agree(peers)
    if outcome.error is not None:
        raise outcome.error
    rows, scratch = room or ({}, torch.empty(0))
    for move in moves:  # in the same order on all ranks, so each finds its partner
        here, sends = scratch[: sizes[move.key]], move.source == peers.me
        if sends:
            here.copy_(torch.frombuffer(data[move.key], dtype=torch.uint8))
        peer = peers.ranks[move.target if sends else move.source]
        message = dist.P2POp(dist.isend if sends else dist.irecv, here, peer, peers.group)
        peers.run(partial(_begin, message))
        if not sends:
            rows[move.key].copy_(here)
    return {move.key: pickle.loads(rows[move.key].numpy().data) for move in moves if move.target == peers.me}


def _room(sizes: Mapping[int, int], device: torch.device) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Return host memory for each, and one buffer for the largest where the back end wants it."""
    rows = {key: torch.empty(size, dtype=torch.uint8) for key, size in sizes.items()}
    return rows, torch.empty(max(sizes.values(), default=0), dtype=torch.uint8, device=device)


def _begin(message: Any) -> Any:
    # A batch of one: for single messages NCCL would make a communicator for each pair of ranks.
    return dist.batch_isend_irecv([message])[0]
