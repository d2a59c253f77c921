"""Which sequences of a batch have routes that can't be used, why, and how many are too many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from npu_replay.errors import MicroBatchError, ReplayError, listed, whole_number
from npu_replay.routes.routed_experts import RoutedExperts

_log = logging.getLogger(__name__)


def find(
    batch: Any,
    lengths: tuple[int, ...],
    fingerprints: Sequence[int | None] | None,
    layers: Sequence[int] | None,
) -> dict[int, ReplayError]:
    """The bad ones by number; see TokenLayout.bad_routes."""
    if isinstance(batch, RoutedExperts) or not isinstance(batch, Sequence):
        raise MicroBatchError(
            "routes are given as a list",
            expected="one RoutedExperts a sequence",
            got=type(batch).__name__,
            cause="[routes] was meant" if isinstance(batch, RoutedExperts) else "",
        )
    if len(batch) != len(lengths):
        raise MicroBatchError(
            "another number of sequences than the layout has",
            expected=len(lengths),
            got=len(batch),
            cause="a batch that was cut or merged after its layout was made",
        )
    if layers is not None:
        layers = [whole_number(layer, "a layer") for layer in listed(layers, "the layers")]
    real = [routes for routes in batch if isinstance(routes, RoutedExperts)]
    kinds = Counter(_kind(routes, layers) for routes in real)
    usual = kinds.most_common(1)[0][0] if kinds else None
    wanted = () if layers is None else tuple(layers)
    lacking = {of: [one for one in wanted if one not in of] for of in {routes.layers for routes in real}}
    found = {}
    for number, (routes, size) in enumerate(zip(batch, lengths, strict=True)):
        error = _problem(number, routes, size, None if fingerprints is None else fingerprints[number])
        if error is None:
            error = _misfit(f"sequence {number}", routes, layers, lacking[routes.layers], usual)
        if error is not None:
            found[number] = error
    return found


def above_ceiling(
    bad: int, samples: int, ceiling: float, *, setting: str = "ceiling", where: str = "", first: object = None
) -> MicroBatchError | None:
    """What is said of too many bad samples; None where they aren't too many.

    The one rule of all that tolerate some: a single one of several is no share, unless none is tolerated.
    """
    if bad == 0 or bad / samples <= ceiling or (ceiling > 0 and bad == 1 < samples):
        return None
    return MicroBatchError(
        f"{bad} of {samples} samples have routes that can't be used",
        where=where,
        expected=f"one of several, or at most {ceiling:.1%} of them ({setting}={ceiling:g})",
        got=f"{bad / samples:.1%}" + (f", the first of them: {first}" if first else ""),
        cause="a fault of the rollout engine or of the decoder, not of single samples",
    )


def check_ceiling(bad: dict[int, ReplayError], sequences: int, ceiling: float) -> None:
    """Raise the first error if none is tolerated, or one about all of them if there are too many."""
    error = next(iter(bad.values()))
    if ceiling == 0:
        raise error
    problem = above_ceiling(len(bad), sequences, ceiling, first=error)
    if problem is not None:
        raise problem from error


def warn(bad: dict[int, ReplayError], sequences: int) -> None:
    """Say how many go without their routes, and why the first does."""
    number, error = next(iter(bad.items()))
    _log.warning(
        "[npu_replay] %d of %d sequences go without their routes, which can't be used; sequence %d: %s",
        len(bad),
        sequences,
        number,
        error.problem,
    )


def _problem(number: int, routes: object, size: int, mark: int | None) -> ReplayError | None:
    """Why these aren't the routes of that sequence; None if they are."""
    where = f"sequence {number}"
    if not isinstance(routes, RoutedExperts):
        return MicroBatchError(
            "this isn't RoutedExperts",
            where=where,
            expected="RoutedExperts",
            got=type(routes).__name__,
            cause="a sample that was aborted, or whose routes were dropped on the way"
            if routes is None
            else "",
        )
    if len(routes) not in (size, size - 1):
        return MicroBatchError(
            "the routes have another number of tokens than the sequence",
            where=where,
            expected=f"{size} (or {size - 1}: the last token has no route)",
            got=len(routes),
            cause="a response that was cut after the rollout, or routes of another sequence",
        )
    if None not in (mark, routes.fingerprint) and mark != routes.fingerprint:
        return MicroBatchError(
            "the routes belong to other tokens",
            where=where,
            expected=f"fingerprint {mark:#018x}",
            got=f"{routes.fingerprint:#018x}",
            cause="retokenised text, a shuffled batch, or parts merged in another order",
        )
    if size > 1 and not bool(routes.recorded.any()):
        return MicroBatchError(
            "no row of these routes is recorded",
            where=where,
            expected="a route for most tokens",
            got=f"none for {len(routes)} tokens",
            cause="a sample that was aborted, or an engine that captured nothing",
        )
    return None


def _misfit(
    where: str, routes: RoutedExperts, layers: Sequence[int] | None, lacking: list[int], usual: object
) -> ReplayError | None:
    """Why these routes can't go into one array with the others of the batch; None if they can."""
    if lacking:
        return MicroBatchError(
            f"nobody recorded decoder layer {lacking[0]}",
            where=where,
            expected=f"layers {list(layers or ())}",
            got=list(routes.layers),
            cause="routes of another pipeline stage, or counted over the MoE layers only where the model "
            "has dense layers too",
        )
    kind = _kind(routes, layers)
    if kind == usual:
        return None
    return MicroBatchError(
        "these routes differ from the others in the batch",
        where=where,
        expected=f"({'' if layers is not None else 'layers, '}top-k, experts) {usual}",
        got=kind,
        cause="routes of different models, or of engines that report other columns",
    )


def _kind(routes: RoutedExperts, layers: Sequence[int] | None) -> tuple[object, ...]:
    """What all sequences of a batch have to agree in."""
    kind = routes.topk, routes.num_experts
    return kind if layers is not None else (routes.layers, *kind)
