"""Reference: takes the place of a sample's routes in a batch; the routes are stored elsewhere in pieces.

`fetch` turns references into the routes that a rank needs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeAlias

from npu_replay.errors import InvalidRoutes, RouterError, one_of, whole_number
from npu_replay.parallel.merge import side_by_side
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes import arguments
from npu_replay.routes.arguments import StageLabels
from npu_replay.routes.routed_experts import RoutedExperts

Read: TypeAlias = "Callable[[Sequence[Any], float], list[RoutedExperts | Exception]]"
"""Reads handles within a number of seconds; returns an exception in place of each that can't be read."""
LAYERS_A_PIECE = 8
"""The number used if the pipeline's split isn't known."""
PATIENCE = 60.0
"""The seconds for everything that one call reads."""


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
        self.key = secrets.randbits(63) or 1
        self.step = step
        self.tokens = len(sample)
        self.fingerprint = sample.fingerprint
        self.num_experts = sample.num_experts
        self.topk = sample.topk
        self.blocks = tuple(blocks)
        self.handles = tuple(handles)
        self.read = read

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the decoder layers of all pieces."""
        return tuple(layer for block in self.blocks for layer in block)

    def __repr__(self) -> str:
        shape = f"{self.tokens} tokens, {len(self.layers)} layers in {len(self.blocks)} pieces"
        return f"Reference({self.key:016x}, {shape}, top-{self.topk} of {self.num_experts})"


Cut: TypeAlias = "list[tuple[int, ...]] | int"
"""The layers of each piece, or the number of layers of a piece."""


def checked_cut(cut: Any) -> Cut:
    """Return the pieces that a carrier asks for by a layout with its decoder, or by a number of layers."""
    if not isinstance(cut, ParallelLayout):
        return whole_number(cut, "layers a piece", least=1)
    # One piece per rank: of two, each rank would have to make a joined copy.
    return [tuple(replace(cut, pp_rank=rank).moe_layers) for rank in range(cut.pp)]


def _pieces(routes: RoutedExperts, cut: Cut) -> list[RoutedExperts]:
    """Return the pieces of one sample; `fetch` refuses layers that the cut has no piece for."""
    layers = routes.layers
    if not isinstance(cut, list):
        return [routes.only(layers[first : first + cut]) for first in range(0, len(layers), cut)]
    blocks = [[layer for layer in stage if layer in layers] for stage in cut]
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
    routes_of_samples = list(samples)
    pieces = [_pieces(routes, cut) for routes in routes_of_samples]
    handles = iter(store([piece for each in pieces for piece in each]))
    return [
        Reference(
            routes,
            blocks=[piece.layers for piece in each],
            handles=list(islice(handles, len(each))),
            read=read,
            step=step,
        )
        for routes, each in zip(routes_of_samples, pieces, strict=True)
    ]


def fetch(
    references: Sequence[Any],
    parallel: ParallelLayout | None = None,
    *,
    layers: Sequence[int] | None = None,
    on_bad_route: Literal["error", "native"] = "error",
    patience: float = PATIENCE,
) -> list[RoutedExperts | None]:
    """Return the routes of these samples, in their order, of the layers that this rank needs.

        samples = delivery.fetch(batch["routes"], parallel)
        rows = layout.gather(samples, layers=parallel.moe_layers)

    Each piece is read once, even if its sample is repeated. Ids aren't checked again. Call it once a step:
    its result is for all passes, chunks and epochs of that step.

    Args:
        references: of `RayCarrier.put`, a list or an object array; with "native" also None.
        parallel: the rank whose layers are read; `layers` names them instead; without either all are read.
        on_bad_route: "native" returns None for a sample that can't be read, which `gather` accepts with the
            same setting, and counts. Each rank decides by itself: those that share a sample have to agree.
        patience: seconds that may pass until all is read.

    Raises:
        InvalidRoutes: something that is no reference; a sample that was freed or lost; layers that were never
            put.
    """
    one_of(on_bad_route, ("error", "native"), "on_bad_route")
    in_order = list(references)
    for number, reference in enumerate(in_order):
        InvalidRoutes.unless(
            isinstance(reference, Reference) or (reference is None and on_bad_route == "native"),
            "this is no reference",
            expected="what RayCarrier.put returned",
            got=type(reference).__name__,
            cause="a sample whose routes nobody put: a rollout without them, or a worker without npu_replay",
            where=f"sample {number}",
        )
    wanted = parallel.moe_layers if layers is None and parallel is not None else layers
    asked = None if wanted is None else arguments.labels(wanted)
    fetched = iter(
        fetch_each([reference for reference in in_order if reference is not None], asked, patience)
    )
    each = [None if reference is None else next(fetched) for reference in in_order]
    for number, routes in enumerate(each):
        if isinstance(routes, InvalidRoutes) and on_bad_route == "error":
            raise routes.at(f"sample {number}")
    return [routes if isinstance(routes, RoutedExperts) else None for routes in each]


def fetch_each(
    references: Sequence[Reference], layers: tuple[int, ...] | None, patience: float
) -> list[RoutedExperts | InvalidRoutes]:
    """Return the routes of each sample, or the error of it; the same object for the same sample."""
    if isinstance(layers, StageLabels):
        for reference in references:
            put = tuple(sorted(reference.layers))
            if layers.among(put) != layers:
                raise RouterError(
                    "the pieces have other labels than the model's",
                    where=repr(reference),
                    expected=layers.whole,
                    got=put,
                    cause="a cut by another count of its layers",
                )
    samples = {reference.key: reference for reference in references}
    wanted = None if layers is None else {*layers}
    asked = [
        (reference, handle)
        for reference in samples.values()
        for block, handle in zip(reference.blocks, reference.handles, strict=True)
        if wanted is None or not wanted.isdisjoint(block)
    ]
    pieces: dict[int, list[object]] = {key: [] for key in samples}
    if asked:
        read = asked[0][0].read([handle for _, handle in asked], patience)
        for (reference, _), piece in zip(asked, read, strict=True):
            pieces[reference.key].append(piece)
    joined = {key: _joined(reference, pieces[key], layers) for key, reference in samples.items()}
    return [joined[reference.key] for reference in references]


def _joined(
    reference: Reference, pieces: Sequence[object], asked: tuple[int, ...] | None
) -> RoutedExperts | InvalidRoutes:
    """Return a sample's pieces side by side, or the error of it."""
    parts = [piece for piece in pieces if isinstance(piece, RoutedExperts)]
    for piece in pieces:
        if not isinstance(piece, RoutedExperts):
            return InvalidRoutes(
                "the routes of this sample can't be read",
                where=repr(reference),
                expected="routes that were put and not yet freed",
                got=f"{type(piece).__name__}: {piece}"[:300],
                cause="a step that is over, whose routes were freed; a worker or a node that died with them",
            )
    labels = reference.layers if asked is None else asked
    if lacking := {*labels} - {layer for part in parts for layer in part.layers}:
        return InvalidRoutes(
            f"nobody put decoder layer {min(lacking)} of this sample",
            where=repr(reference),
            expected=list(labels),
            got=list(reference.layers),
            cause="a rank whose layers are another model's, or counted otherwise",
        )
    parts = [part.only([layer for layer in part.layers if layer in {*labels}]) for part in parts]
    if not parts:  # a rank of dense layers
        return RoutedExperts.unrecorded(
            reference.tokens, layers=(), topk=reference.topk, num_experts=reference.num_experts
        )
    return side_by_side(parts)
