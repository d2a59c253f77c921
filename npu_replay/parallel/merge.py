"""Merges what several ranks have of one micro-batch, as it arrives."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

from npu_replay.errors import MicroBatchError, micro_batch
from npu_replay.routers import PART_BY_PART
from npu_replay.routes.arguments import known_of_all
from npu_replay.routes.routed_experts import RoutedExperts


@dataclass(frozen=True)
class Block:
    """Holds routes of the tokens of a micro-batch that `present`, bool [tokens], marks, in packed order."""

    present: torch.Tensor
    routes: RoutedExperts

    def part(self) -> Part:
        """Describe the block without its ids."""
        tokens = self.present.to(torch.uint8)
        rows = len(self.routes)
        tokens[self.present] += self.routes.recorded  # 1 for a token that is present, and 2 if it has a route
        content = blake2b(self.rows(0, rows).numpy().data, digest_size=16).hexdigest()
        return Part(zlib.compress(tokens.numpy().data, 1), self.routes.sequence(0, 0), rows, content)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Return the ids of these rows as bytes, on the block's own memory."""
        return self.routes.ids[first:end].reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Part:
    """Describes a rank's block before its ids are sent.

    Attributes:
        tokens: one byte per token of the micro-batch, compressed: 0 not here, 1 without a route, 2 with one.
        like: routes of no token, which have the block's layers and model.
        rows: the rows of the block.
        content: the digest of its ids.
    """

    tokens: bytes
    like: RoutedExperts = field(hash=False)
    rows: int
    content: str

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token's ids."""
        return self.like.ids.shape[1:].numel() * self.like.ids.itemsize


class Union:
    """Merges the parts of one micro-batch, all tokens and layers, as their ids arrive."""

    def __init__(self, number: int, parts: list[Part]) -> None:
        like = [part.like for part in parts]
        kinds = {f"top-{routes.topk} of {routes.num_experts} experts" for routes in like}
        if len(kinds) != 1:
            raise MicroBatchError(
                "the ranks recorded routers of another shape",
                where=micro_batch(number),
                expected="one top-k and number of experts",
                got=" and ".join(sorted(kinds)),
                cause=f"different models on the ranks; or {PART_BY_PART}",
            )
        self._number = number
        self._like = like
        all_tokens = [np.frombuffer(zlib.decompress(part.tokens), np.uint8) for part in parts]
        self._held = torch.from_numpy(np.any(all_tokens, axis=0))
        # A token's row is its rank among the held ones.
        place = self._held.cumsum(0) - 1
        self._rows = {part: place[tokens > 0] for part, tokens in zip(parts, all_tokens, strict=True)}
        # A token has a route only if each part that holds it says so: some layers alone are of no use.
        self._recorded = torch.ones(int(self._held.sum()), dtype=torch.bool, device="cpu")
        for part, tokens in zip(parts, all_tokens, strict=True):
            self._recorded[self._rows[part]] &= torch.from_numpy(tokens[tokens > 0] == 2)
        self._labels = sorted({layer for routes in like for layer in routes.layers})
        self._known = torch.zeros(len(self._recorded), len(self._labels), dtype=torch.bool, device="cpu")
        self._ids = torch.empty(*self._known.shape, like[0].topk, dtype=like[0].ids.dtype, device="cpu")

    def put(self, part: Part, first: int, data: torch.Tensor) -> None:
        """Store ids, bytes on any device, of the part's rows from `first` on; refuse a second route."""
        ids = data.cpu().view(self._ids.dtype).view(-1, *part.like.ids.shape[1:])
        rows = self._rows[part][first : first + len(ids)]
        for layer, theirs in zip(part.like.layers, ids.unbind(1), strict=True):
            column = self._labels.index(layer)
            # Layouts may overlap: a place that another part has filled must hold the same route.
            twice = self._known[rows, column]
            differ = int((self._ids[rows[twice], column] != theirs[twice]).any(dim=1).sum())
            if differ:
                raise MicroBatchError(
                    "two ranks recorded the same token differently",
                    where=micro_batch(self._number, layer),
                    expected="layouts that don't overlap, or the same routes where they do",
                    got=f"{differ} tokens with two routes",
                    cause="layouts of another rank, or of another context parallel cut than the trainer's",
                )
            self._ids[rows, column] = theirs
            self._known[rows, column] = True

    def block(self) -> Block:
        """Return all of it, after every part's ids are stored; refuse a token that lacks some layers."""
        if not bool(self._known.all()):
            row, column = (~self._known).nonzero()[0].tolist()
            token = int(self._held.nonzero()[row])
            layer = self._labels[column]
            raise MicroBatchError(
                f"{int((~self._known).sum())} token-layers were recorded by no rank",
                where=f"{micro_batch(self._number)}, token {token}, layer {layer}",
                expected="every token in every layer on some rank of the group",
                got="none",
                cause="layouts that don't cover the batch, or a rank that isn't in the group",
            )
        self._ids[~self._recorded] = 0  # recorded by some ranks, and not by others
        routes = RoutedExperts(
            ids=self._ids,
            layers=self._labels,
            num_experts=self._like[0].num_experts,
            recorded=self._recorded,
            copy=False,
        )
        return Block(self._held, routes.with_known(**known_of_all(self._like)))


def side_by_side(parts: Sequence[RoutedExperts]) -> RoutedExperts:
    """Return the same tokens' routes in all layers of the parts, which share none."""
    first, *others = parts
    if not others:
        return first
    ids = torch.cat([part.ids for part in parts], dim=1)
    together = [layer for part in parts for layer in part.layers]
    order = sorted(together)
    if together != order:  # interleaved stages: a rank's layers aren't neighbours
        ids = ids[:, [together.index(layer) for layer in order]]
    known = known_of_all(parts) | {"layers": tuple(order), "fingerprint": first.fingerprint}
    return first.with_rows(ids, first.recorded, **known)
