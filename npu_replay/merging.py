"""Block: some tokens of one micro-batch in some layers, and the union of what several ranks have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch

from npu_replay import route_bytes
from npu_replay.errors import MicroBatchError, micro_batch
from npu_replay.routed_experts import RoutedExperts, narrow_dtype


@dataclass(frozen=True)
class Block:
    """Some tokens of one micro-batch in some layers.

    Attributes:
        held: bool [tokens of the micro-batch], the tokens that are here.
        routes: theirs, in packed order.
    """

    held: torch.Tensor
    routes: RoutedExperts

    @cached_property
    def data(self) -> bytes:
        """The wire form: one bit a token, then the routes' own."""
        return np.packbits(self.held.numpy()).tobytes() + self.routes.to_bytes()

    @property
    def place(self) -> str:
        """A digest of the tokens and layers: the same where two ranks have the same."""
        return digest(np.packbits(self.held.numpy()).tobytes() + repr(self.routes.layers).encode())

    @classmethod
    def from_data(cls, data: memoryview, tokens: int) -> Block:
        """Read `data` of a micro-batch with so many tokens."""
        size = (tokens + 7) // 8
        held = np.unpackbits(np.frombuffer(data[:size], np.uint8), count=tokens).astype(bool)
        return cls(torch.from_numpy(held), RoutedExperts._adopt(**route_bytes.parse(data[size:])))


def digest(data: bytes) -> str:
    """A short name for these bytes."""
    return blake2b(data, digest_size=16).hexdigest()


def union(number: int, parts: list[Block]) -> Block | None:
    """All tokens and layers of the parts, in one block without holes; None without any part.

    Raises:
        MicroBatchError: a hole, or a token that two parts have different routes for.
    """
    if len(parts) <= 1:
        return parts[0] if parts else None
    _check_alike(number, parts)
    labels = sorted({layer for part in parts for layer in part.routes.layers})
    held = torch.stack([part.held for part in parts]).any(dim=0)
    place = held.cumsum(0) - 1
    like = parts[0].routes
    shape = (int(held.sum()), len(labels))
    ids = torch.zeros(*shape, like.topk, dtype=narrow_dtype(like.num_experts))
    known = torch.zeros(shape, dtype=torch.bool)
    recorded = torch.ones(shape[0], dtype=torch.bool)
    for part in parts:
        rows = place[part.held]
        for column, layer in enumerate(part.routes.layers):
            _check_same(number, layer, ids[:, labels.index(layer)], known[:, labels.index(layer)], rows, part)
            ids[rows, labels.index(layer)] = part.routes.ids[:, column]
            known[rows, labels.index(layer)] = True
        recorded[rows] &= part.routes.recorded
    if not bool(known.all()):
        row, column = (~known).nonzero()[0].tolist()
        raise MicroBatchError(
            f"{int((~known).sum())} token-layers were recorded by no rank",
            where=f"{micro_batch(number)}, token {int(held.nonzero()[row])}, layer {labels[column]}",
            expected="every token in every layer on some rank of the group",
            got="none",
            cause="layouts that don't cover the batch, or a rank that isn't in the group",
        )
    versions = {part.routes.weight_version for part in parts}
    version = versions.pop() if len(versions) == 1 else None
    vouched = all(part.routes.vouched for part in parts)
    return Block(
        held,
        RoutedExperts._adopt(
            ids, labels, like.num_experts, recorded=recorded, weight_version=version, vouched=vouched
        ),
    )


def _check_alike(number: int, parts: list[Block]) -> None:
    kinds = [(part.routes.topk, part.routes.num_experts) for part in parts]
    for kind in kinds:
        if kind != kinds[0]:
            raise MicroBatchError(
                "the ranks recorded routers of another shape",
                where=micro_batch(number),
                expected=f"top-{kinds[0][0]} of {kinds[0][1]} experts",
                got=f"top-{kind[0]} of {kind[1]}",
                cause="different models or configs on the ranks",
            )


def _check_same(
    number: int, layer: int, ids: torch.Tensor, known: torch.Tensor, rows: torch.Tensor, part: Block
) -> None:
    """Where another rank had the same token in the same layer, it has to be the same route."""
    twice = known[rows]
    theirs = part.routes.layer_ids(layer)[twice]
    if bool((ids[rows[twice]] != theirs).any()):
        raise MicroBatchError(
            "two ranks recorded the same token differently",
            where=micro_batch(number, layer),
            expected="layouts that don't overlap, or the same routes where they do",
            got=f"{int((ids[rows[twice]] != theirs).any(dim=1).sum())} tokens with two routes",
            cause="layouts of another rank, or of another context parallel cut than the trainer's",
        )
