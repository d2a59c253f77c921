"""Reference: takes the place of a sample's routes in a batch; the routes are stored elsewhere in pieces."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

from npu_replay.errors import InvalidRoutes, ReplayError, whole_number
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes.routed_experts import RoutedExperts

Read: TypeAlias = "Callable[[Sequence[Any], float], list[RoutedExperts | Exception]]"
"""Reads handles within so many seconds; returns an exception in the place of each that can't be read."""
LAYERS_A_PIECE = 8
"""The number used if the pipeline's split isn't known."""


# No dataclass: a batch's container may be pydantic's, which turns dataclasses into dicts.
class Reference:
    """Refers to one sample's stored routes. It can be pickled, copied, moved and repeated, and holds no ids.

    Attributes:
        key: identifies the sample, 63 bits; a sample that is put twice has two.
        step: the job's step, as the caller of `put` gives it.
        tokens: rows of the routes.
        fingerprint: of the tokens, if the routes have it.
        num_experts, topk: of the model.
        blocks: the decoder layers of each piece, ascending.
        handles: a handle to read each piece by.
        read: reads handles: a function that can be pickled.
    """

    def __init__(
        self,
        sample: RoutedExperts,
        *,
        blocks: Sequence[tuple[int, ...]],
        handles: Sequence[Any],
        read: Read,
        step: int = 0,
    ) -> None:
        self.key, self.step = secrets.randbits(63) or 1, step
        self.tokens, self.fingerprint = len(sample), sample.fingerprint
        self.num_experts, self.topk = sample.num_experts, sample.topk
        self.blocks, self.handles, self.read = tuple(blocks), tuple(handles), read

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the decoder layers of all pieces."""
        return tuple(layer for block in self.blocks for layer in block)

    def __repr__(self) -> str:
        shape = f"{self.tokens} tokens, {len(self.layers)} layers in {len(self.blocks)} pieces"
        return f"Reference({self.key:016x}, {shape}, top-{self.topk} of {self.num_experts})"


class Cut:
    """Cuts the layers of samples into pieces; `cut` is that of `RayCarrier`."""

    def __init__(self, cut: Any) -> None:
        self._each = LAYERS_A_PIECE
        self._blocks: list[tuple[int, ...]] | None = None
        if isinstance(cut, ParallelLayout):
            problem = "this layout doesn't tell the layers of a pipeline's stages"
            cause = "a layout made by hand; give the layers of each piece, or how many one has"
            fine = cut.decoder is not None
            ReplayError.unless(fine, problem, "a ParallelLayout with decoder=", cut, cause)
            # One piece per rank: of two, each rank would have to make a joined copy.
            self._blocks = [replace(cut, pp_rank=rank).moe_layers for rank in range(cut.pp)]
        else:
            self._each = whole_number(cut, "layers a piece", least=1)

    def pieces(self, routes: RoutedExperts) -> list[RoutedExperts]:
        """Return the pieces of one sample; refuse a layer that the cut has no piece for."""
        layers, each = routes.layers, self._each
        if self._blocks is None:
            return [routes.only(layers[first : first + each]) for first in range(0, len(layers), each)]
        blocks = [tuple(layer for layer in block if layer in {*layers}) for block in self._blocks]
        lost = {*layers} - {layer for block in blocks for layer in block}
        problem, cause = (
            "the cut has no piece for some layers",
            "the layout of another model, or of a part of it",
        )
        wanted = f"a piece for each of {list(layers)}"
        ReplayError.unless(not lost, problem, wanted, f"none for {sorted(lost)}", cause)
        return [routes.only(block) for block in blocks if block]


def put_away(
    samples: Iterable[RoutedExperts],
    cut: Cut,
    store: Callable[[Sequence[RoutedExperts]], Sequence[Any]],
    read: Read,
    step: int = 0,
) -> list[Reference]:
    """Store samples in pieces, and return their references."""
    # RoutedExperts' ids are checked; `fetch` checks none again.
    given = list(samples)
    for one in given:
        fine, kind = isinstance(one, RoutedExperts), type(one).__name__
        InvalidRoutes.unless(fine, "these are no routes", "RoutedExperts", kind)
    pieces = [cut.pieces(one) for one in given]
    handles = iter(store([piece for each in pieces for piece in each]))
    return [
        Reference(
            one,
            blocks=[piece.layers for piece in each],
            handles=list(islice(handles, len(each))),
            read=read,
            step=step,
        )
        for one, each in zip(given, pieces, strict=True)
    ]
