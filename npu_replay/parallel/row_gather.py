"""Picks a rank's rows out of its samples: a plan once, then one copy of what the rank has of each sample.

Samples whose routes can't be used are found before; `tolerate` decides how many are too many.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_replay.errors import MicroBatchError, ReplayError
from npu_replay.routes import arguments
from npu_replay.routes.arguments import StageLabels
from npu_replay.routes.checks import Array, Finding
from npu_replay.routes.fingerprint import find_other_tokens
from npu_replay.routes.routed_experts import RoutedExperts

CEILING = 0.01
"""The share of bad samples that is tolerated by default."""
_NONE = (
    "a sample that was aborted, or whose routes were dropped on the way. "
    'TokenLayout.gather(..., on_bad_route="native") lets the routers choose for it; where no sample of the '
    "batch has routes, put RoutedExperts.unrecorded(...) in the place of None"
)

_log = logging.getLogger(__name__)


class SampleRows(NamedTuple):
    """Holds the rows that one sample's tokens go to: int64 [n] each, the tokens ascending."""

    sample: int
    tokens: Array
    rows: Array


def plan(rows: torch.Tensor, lengths: Sequence[int]) -> list[SampleRows]:
    """Return which tokens of each sample go where, by the packed token of each row (int64, -1 for none)."""
    of_rows = rows.numpy()
    # Sorted by packed token, the tokens of a sample are neighbours, and padding comes first.
    order = np.argsort(of_rows, kind="stable")
    packed = of_rows[order]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    spans = pairwise(np.searchsorted(packed, starts).tolist())
    return [
        SampleRows(sample, packed[first:end] - starts[sample], order[first:end])
        for sample, (first, end) in enumerate(spans)
        if first < end
    ]


def pick(
    plan: Sequence[SampleRows], rows: int, samples: Mapping[int, RoutedExperts], layers: Sequence[int]
) -> RoutedExperts:
    """Return the routes of these layers in a rank's rows; rows of other samples, or past an end, lack one.

    The samples are alike in top-k and experts, as `find_bad` has it.
    """
    labels = arguments.labels(layers)
    like = next(iter(samples.values()))
    here = [part for part in plan if part.sample in samples]
    used = [samples[part.sample] for part in here]
    kinds = {routes.layers: routes for routes in used}  # one most often: samples of an engine share them
    columns = {of: routes.columns(labels) for of, routes in kinds.items()}
    # numpy asks for huge pages; torch uses small ones, whose page faults take longer than the copy.
    ids = np.empty((rows, len(labels), like.topk), like.ids.numpy().dtype)
    recorded = np.zeros(rows, np.bool_)
    for part, routes in zip(here, used, strict=True):
        known = slice(np.searchsorted(part.tokens, len(routes)))  # routes may lack the last token
        tokens = part.tokens[known]
        # np.take copies whole rows at once.
        ids[part.rows[known]] = np.take(routes.ids.numpy()[:, columns[routes.layers]], tokens, axis=0)
        recorded[part.rows[known]] = routes.recorded.numpy()[tokens]
    ids[~recorded] = 0
    return like.with_rows(
        torch.from_numpy(ids),
        torch.from_numpy(recorded),
        layers=tuple(labels),
        **arguments.known_of_all(used),
    )


def find_bad(
    batch: Any,
    lengths: tuple[int, ...],
    fingerprints: Sequence[int | None] | None,
    layers: Sequence[int] | None,
) -> dict[int, ReplayError]:
    """Return the sequences of a batch whose routes can't be used, by number; see TokenLayout.bad_routes."""
    if len(batch) != len(lengths) or isinstance(batch, RoutedExperts):
        raise MicroBatchError(
            "another number of sequences than the layout has",
            expected=len(lengths),
            got="one RoutedExperts, and no list" if isinstance(batch, RoutedExperts) else len(batch),
            cause="a batch that was cut or merged after its layout was made; [routes] was meant",
        )
    labels = None if layers is None else arguments.labels(layers)
    # What all sequences of a batch must share.
    kinds: list[tuple[object, ...] | None] = [
        (*((routes.layers,) if labels is None else ()), routes.topk, routes.num_experts)
        if isinstance(routes, RoutedExperts)
        else None
        for routes in batch
    ]
    counted = Counter(kind for kind in kinds if kind is not None).most_common(1)
    usual = counted[0][0] if counted else None
    marks = (None,) * len(lengths) if fingerprints is None else fingerprints
    bad: dict[int, ReplayError] = {}
    for number, (routes, size, mark, of) in enumerate(zip(batch, lengths, marks, kinds, strict=True)):
        wrong = _find_wrong(routes, size, mark, labels)
        if wrong is None and of != usual:
            wrong = Finding(
                "these routes differ from the others in the batch",
                f"({'layers, ' if labels is None else ''}top-k, experts) {usual}",
                of,
                cause="routes of different models, or of engines that report other columns",
            )
        if wrong is not None:
            bad[number] = wrong.error(MicroBatchError, f"sequence {number}")
    return bad


def _find_wrong(
    routes: object, size: int, mark: int | None, layers: tuple[int, ...] | None
) -> Finding | None:
    """Return why the routes of one sequence can't be used, or None."""
    if not isinstance(routes, RoutedExperts):
        return Finding(
            "this isn't RoutedExperts",
            "RoutedExperts",
            type(routes).__name__,
            cause=_NONE
            if routes is None
            else "an array of ids: RoutedExperts(ids=...) checks and holds them",
        )
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
            f"layers {list(layers)}",
            list(routes.layers),
            cause="routes of another pipeline stage, or columns that count the MoE layers only",
        )
    return None


def above_ceiling(
    bad: int, samples: int, ceiling: float, *, setting: str = "ceiling", where: str = "", first: object = None
) -> MicroBatchError | None:
    """Return the error about too many bad samples, or None."""
    # One bad sample of several is tolerated whatever its share, unless the ceiling is 0.
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
