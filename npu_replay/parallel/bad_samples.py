"""Which sequences of a batch have routes that can't be used, why, and how many are too many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from npu_replay.errors import MicroBatchError, ReplayError, listed, whole_number
from npu_replay.routes.routed_experts import RoutedExperts

CEILING = 0.01
"""The share of bad samples that is tolerated where the user says no other."""

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
    kinds = Counter(_kind(one, layers) for one in batch if isinstance(one, RoutedExperts))
    usual = kinds.most_common(1)[0][0] if kinds else None
    marks = (None,) * len(lengths) if fingerprints is None else fingerprints
    found: dict[int, ReplayError] = {}
    for number, (routes, size, mark) in enumerate(zip(batch, lengths, marks, strict=True)):
        if (wrong := _problem(routes, size, mark, layers, usual)) is not None:
            problem, expected, got, cause = wrong
            where = f"sequence {number}"
            found[number] = MicroBatchError(problem, where=where, expected=expected, got=got, cause=cause)
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


def tolerate(bad: dict[int, ReplayError], samples: int, ceiling: float) -> None:
    """Log how many go without their routes, and why the first does.

    Raises:
        ReplayError: the first, if none is tolerated; or one about all of them, if they are too many.
    """
    number, first = next(iter(bad.items()))
    if ceiling == 0:
        raise first
    if (too_many := above_ceiling(len(bad), samples, ceiling, first=first)) is not None:
        raise too_many from first
    _log.warning(
        "[npu_replay] %d of %d sequences go without their routes, which can't be used; sequence %d: %s",
        *(len(bad), samples, number, first.problem),
    )


def _problem(
    routes: object, size: int, mark: int | None, layers: Sequence[int] | None, usual: object
) -> tuple[str, object, object, str] | None:
    """What is wrong with the routes of a sequence, what was expected, what came, and the usual cause."""
    if not isinstance(routes, RoutedExperts):
        cause = "a sample that was aborted, or whose routes were dropped on the way" if routes is None else ""
        return "this isn't RoutedExperts", "RoutedExperts", type(routes).__name__, cause
    if len(routes) not in (size, size - 1):
        return (
            "the routes have another number of tokens than the sequence",
            f"{size} (or {size - 1}: the last token has no route)",
            len(routes),
            "a response that was cut after the rollout, or routes of another sequence",
        )
    if mark is not None and routes.fingerprint is not None and mark != routes.fingerprint:
        return (
            "the routes belong to other tokens",
            f"fingerprint {mark:#018x}",
            f"{routes.fingerprint:#018x}",
            "retokenised text, a shuffled batch, or parts merged in another order",
        )
    if size > 1 and not bool(routes.recorded.any()):
        return (
            "no row of these routes is recorded",
            "a route for most tokens",
            f"none for {len(routes)} tokens",
            "a sample that was aborted, or an engine that captured nothing",
        )
    if lacking := set(layers or ()).difference(routes.layers):
        return (
            f"nobody recorded decoder layer {min(lacking)}",
            f"layers {layers}",
            list(routes.layers),
            "routes of another pipeline stage, or columns that count the MoE layers only, without dense ones",
        )
    if (kind := _kind(routes, layers)) != usual:
        return (
            "these routes differ from the others in the batch",
            f"({'' if layers is not None else 'layers, '}top-k, experts) {usual}",
            kind,
            "routes of different models, or of engines that report other columns",
        )
    return None


def _kind(routes: RoutedExperts, layers: Sequence[int] | None) -> tuple[object, ...]:
    """What all sequences of a batch have to agree in."""
    kind = routes.topk, routes.num_experts
    return kind if layers is not None else (routes.layers, *kind)
