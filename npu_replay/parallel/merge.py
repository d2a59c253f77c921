"""The union of what several ranks have of one micro-batch, put together as it arrives."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from npu_replay.errors import MicroBatchError, micro_batch
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype


@dataclass(frozen=True)
class Block:
    """Some tokens of one micro-batch in some layers.

    Attributes:
        held: bool [tokens of the micro-batch], the tokens that are here.
        routes: theirs, in packed order.
    """

    held: torch.Tensor
    routes: RoutedExperts

    def part(self) -> Part:
        """All that is to be known of it beside its ids."""
        routes = self.routes
        return Part(
            held=_packed(self.held),
            recorded=_packed(routes.recorded),
            layers=routes.layers,
            rows=len(routes),
            topk=routes.topk,
            num_experts=routes.num_experts,
            weight_version=routes.weight_version,
            vouched=routes.vouched,
            content=blake2b(self.rows(0, len(routes)).numpy().data, digest_size=16).hexdigest(),
        )

    def rows(self, first: int, end: int) -> torch.Tensor:
        """The ids of these rows as bytes; on the block's own memory."""
        return self.routes.ids[first:end].reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Part:
    """What a rank says of its block before its ids are sent.

    Attributes:
        held: which tokens of the micro-batch, as bits, compressed.
        recorded: which of those have a route, as bits, compressed.
        content: a digest of the ids.
    """

    held: bytes
    recorded: bytes
    layers: tuple[int, ...]
    rows: int
    topk: int
    num_experts: int
    weight_version: int | str | None
    vouched: bool
    content: str

    @property
    def place(self) -> tuple[bytes, tuple[int, ...]]:
        """The tokens and layers: the same where two ranks have the same."""
        return self.held, self.layers

    @property
    def row_bytes(self) -> int:
        """Of one token's ids."""
        return len(self.layers) * self.topk * narrow_dtype(self.num_experts).itemsize

    def tokens(self, of: int) -> torch.Tensor:
        """Which of so many tokens are here."""
        return _unpacked(self.held, of).nonzero()[:, 0]


class Union:
    """All tokens and layers of the parts of one micro-batch, whose ids are put in as they come.

    Raises:
        MicroBatchError: the parts are of routers of another shape.
    """

    def __init__(self, number: int, tokens: int, parts: list[Part]) -> None:
        _check_alike(number, parts)
        self._number, self._tokens, self._like = number, tokens, parts[0]
        self._vouched = all(part.vouched for part in parts)
        self._versions = {part.weight_version for part in parts}
        self._held = torch.stack([_unpacked(part.held, tokens) for part in parts]).any(dim=0)
        self._place = self._held.cumsum(0) - 1
        self._labels = sorted({layer for part in parts for layer in part.layers})
        shape = (int(self._held.sum()), len(self._labels))
        self._ids = torch.empty(*shape, self._like.topk, dtype=narrow_dtype(self._like.num_experts))
        self._known = torch.zeros(shape, dtype=torch.bool)
        self._recorded = torch.ones(shape[0], dtype=torch.bool)
        for part in parts:
            self._recorded[self._place[part.tokens(tokens)]] &= _unpacked(part.recorded, part.rows)

    def put(self, part: Part, first: int, data: torch.Tensor) -> None:
        """Put in the ids of the part's rows from `first` on, as bytes.

        Raises:
            MicroBatchError: another part has a different route for one of them.
        """
        ids = data.view(self._ids.dtype).view(-1, len(part.layers), part.topk)
        rows = self._place[part.tokens(self._tokens)[first : first + len(ids)]]
        for number, layer in enumerate(part.layers):
            column = self._labels.index(layer)
            self._check_same(layer, rows, self._known[rows, column], ids[:, number], column)
            self._ids[rows, column] = ids[:, number]
            self._known[rows, column] = True

    def _check_same(
        self, layer: int, rows: torch.Tensor, twice: torch.Tensor, ids: torch.Tensor, column: int
    ) -> None:
        """Where another rank had the same token in the same layer, it has to be the same route."""
        if not bool(twice.any()):
            return
        differ = (self._ids[rows[twice], column] != ids[twice]).any(dim=1)
        if bool(differ.any()):
            raise MicroBatchError(
                "two ranks recorded the same token differently",
                where=micro_batch(self._number, layer),
                expected="layouts that don't overlap, or the same routes where they do",
                got=f"{int(differ.sum())} tokens with two routes",
                cause="layouts of another rank, or of another context parallel cut than the trainer's",
            )

    def block(self) -> Block:
        """All of it, when every part's ids were put in.

        Raises:
            MicroBatchError: a token was recorded in some of the layers only.
        """
        if not bool(self._known.all()):
            row, column = (~self._known).nonzero()[0].tolist()
            raise MicroBatchError(
                f"{int((~self._known).sum())} token-layers were recorded by no rank",
                where=f"{micro_batch(self._number)}, token {int(self._held.nonzero()[row])}, "
                f"layer {self._labels[column]}",
                expected="every token in every layer on some rank of the group",
                got="none",
                cause="layouts that don't cover the batch, or a rank that isn't in the group",
            )
        self._ids[~self._recorded] = 0  # recorded by some ranks, and not by others
        version = next(iter(self._versions)) if len(self._versions) == 1 else None
        routes = RoutedExperts._adopt(
            self._ids,
            self._labels,
            self._like.num_experts,
            recorded=self._recorded,
            weight_version=version,
            vouched=self._vouched,
        )
        return Block(self._held, routes)


def _packed(flags: torch.Tensor) -> bytes:
    """One bit a flag; most are alike, so that little is left when compressed."""
    return zlib.compress(np.packbits(flags.numpy()).tobytes(), 1)


def _unpacked(data: bytes, count: int) -> torch.Tensor:
    flags = np.unpackbits(np.frombuffer(zlib.decompress(data), np.uint8), count=count)
    return torch.from_numpy(flags.astype(bool))


def _check_alike(number: int, parts: list[Part]) -> None:
    kinds = [(part.topk, part.num_experts) for part in parts]
    for kind in kinds:
        if kind != kinds[0]:
            raise MicroBatchError(
                "the ranks recorded routers of another shape",
                where=micro_batch(number),
                expected=f"top-{kinds[0][0]} of {kinds[0][1]} experts",
                got=f"top-{kind[0]} of {kind[1]}",
                cause="different models or configs on the ranks",
            )
