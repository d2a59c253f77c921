"""Finds the sequences of a batch whose routes can't be used, and decides how many are too many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from npu_replay.errors import MicroBatchError, ReplayError
from npu_replay.routes import arguments
from npu_replay.routes.arguments import StageLabels
from npu_replay.routes.checks import Finding
from npu_replay.routes.fingerprint import find_other_tokens
from npu_replay.routes.routed_experts import RoutedExperts

CEILING = 0.01
"""The share of bad samples that is tolerated by default."""

_log = logging.getLogger(__name__)


def find(
    batch: Any,
    lengths: tuple[int, ...],
    fingerprints: Sequence[int | None] | None,
    layers: Sequence[int] | None,
) -> dict[int, ReplayError]:
    """Return the bad ones by number; see TokenLayout.bad_routes."""
    single = isinstance(batch, RoutedExperts)
    fine, cause = isinstance(batch, Sequence) and not single, "[routes] was meant" if single else ""
    kind = type(batch).__name__
    MicroBatchError.unless(fine, "routes are given as a list", "one RoutedExperts a sequence", kind, cause)
    problem = "another number of sequences than the layout has"
    cause = "a batch that was cut or merged after its layout was made"
    MicroBatchError.unless(len(batch) == len(lengths), problem, len(lengths), len(batch), cause)
    layers = None if layers is None else arguments.labels(layers)
    kinds = [_kind(one, layers) if isinstance(one, RoutedExperts) else None for one in batch]
    usual = kinds[0] if kinds else None
    if kinds.count(usual) < len(kinds):  # only then: counting hashes each, and most batches are alike
        counted = Counter(kind for kind in kinds if kind is not None)
        usual = counted.most_common(1)[0][0]
    marks = (None,) * len(lengths) if fingerprints is None else fingerprints
    found: dict[int, ReplayError] = {}
    for number, (routes, size, mark, of) in enumerate(zip(batch, lengths, marks, kinds, strict=True)):
        if (wrong := _find_bad(routes, size, mark, layers, of, usual)) is not None:
            found[number] = wrong.error(MicroBatchError, f"sequence {number}")
    return found


def above_ceiling(
    bad: int, samples: int, ceiling: float, *, setting: str = "ceiling", where: str = "", first: object = None
) -> MicroBatchError | None:
    """Return the error about too many bad samples, or None."""
    # One of several is tolerated whatever its share, unless nothing is.
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
    """Log how many go without their routes, and why the first does; raise if they are too many."""
    number, first = next(iter(bad.items()))
    if ceiling == 0:
        raise first
    if (too_many := above_ceiling(len(bad), samples, ceiling, first=first)) is not None:
        raise too_many from first
    _log.warning(
        "[npu_replay] %d of %d sequences go without their routes, which can't be used; sequence %d: %s",
        *(len(bad), samples, number, first.problem),
    )


def _find_bad(
    routes: object, size: int, mark: int | None, layers: Sequence[int] | None, kind: object, usual: object
) -> Finding | None:
    """Return what is wrong with the routes of one sequence; `kind` is compared with the batch's usual one."""
    if not isinstance(routes, RoutedExperts):
        cause = "a sample that was aborted, or whose routes were dropped on the way" if routes is None else ""
        return Finding("this isn't RoutedExperts", "RoutedExperts", type(routes).__name__, cause=cause)
    if (other := find_other_tokens(len(routes), routes.fingerprint, size, mark)) is not None:
        return other
    # A stage of dense layers has fetched nothing. Most often the first row is recorded, so it is read first.
    flags = routes.recorded.numpy()
    if size > 1 and routes.layers and not (flags[0] or flags.any()):
        return Finding(
            "no row of these routes is recorded",
            "a route for most tokens",
            f"none for {len(routes)} tokens",
            cause="a sample that was aborted, or an engine that captured nothing",
        )
    if isinstance(layers, StageLabels):
        layers = layers.among(routes.layers)
    if layers and (lacking := set(layers).difference(routes.layers)):
        return Finding(
            f"nobody recorded decoder layer {min(lacking)}",
            f"layers {list(layers or ())}",
            list(routes.layers),
            cause="routes of another pipeline stage, or columns that count the MoE layers only",
        )
    if kind != usual:
        return Finding(
            "these routes differ from the others in the batch",
            f"({'' if layers is not None else 'layers, '}top-k, experts) {usual}",
            kind,
            cause="routes of different models, or of engines that report other columns",
        )
    return None


def _kind(routes: RoutedExperts, layers: Sequence[int] | None) -> tuple[object, ...]:
    """Return the values that all sequences of a batch must share."""
    kind = routes.topk, routes.num_experts
    return kind if layers is not None else (routes.layers, *kind)
