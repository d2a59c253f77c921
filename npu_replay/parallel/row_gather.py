"""Picks a rank's rows out of its samples: a plan once, then one copy of what it has of each sample.

Samples whose routes can't be used are found before; `tolerate` decides how many are too many.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
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
_FEW = 8
"""The most runs per sample that are copied one by one; beyond, tokens are looked up singly."""

_NONE = (
    "a sample that was aborted, or whose routes were dropped on the way. "
    'TokenLayout.gather(..., on_bad_route="native") lets the routers choose for it; where no sample of the '
    "batch has routes, put RoutedExperts.unrecorded(...) in the place of None"
)

_log = logging.getLogger(__name__)


class Run(NamedTuple):
    """Holds tokens of one sample, ascending, and the rows that they go to: slices, or int64 [n]."""

    sample: int
    tokens: Any
    rows: Any

    def first(self, tokens: int) -> Run:
        """Return the run within the first `tokens` of the sample, whose routes may lack the last."""
        if isinstance(self.tokens, slice):
            if self.tokens.stop <= tokens:
                return self
            count = len(range(self.tokens.start, tokens, self.tokens.step))
        else:
            count = int(np.searchsorted(self.tokens, tokens))
        return Run(self.sample, _first(self.tokens, count), _first(self.rows, count))


def _first(at: slice | Array, count: int) -> slice | Array:
    return slice(at.start, at.start + count * at.step, at.step) if isinstance(at, slice) else at[:count]


def plan(rows: torch.Tensor, lengths: Sequence[int]) -> list[Run]:
    """Return the runs of a layout, by the packed token of each row (int64, -1 for none) and the lengths."""
    of_rows = rows.numpy()
    # Sorted by packed token, the tokens of a sample are neighbours. A run ends with its sample, or where a
    # number is skipped; with many skips one run has all tokens of its sample.
    order = np.argsort(of_rows, kind="stable")
    order = order[np.searchsorted(of_rows[order], 0) :]  # without the padding
    packed = of_rows[order]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    of_sample = np.searchsorted(packed, starts)
    jumps = np.flatnonzero(np.diff(packed) != 1) + 1
    cuts = np.union1d(jumps, of_sample) if len(jumps) <= _FEW * len(lengths) else np.unique(of_sample)
    runs = []
    for first, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        sample = int(np.searchsorted(starts, packed[first], side="right")) - 1
        tokens = packed[first:end] - starts[sample]
        runs.append(Run(sample, _even(tokens), _even(order[first:end])))
    return runs


def _even(numbers: Array) -> slice | Array:
    """Return a slice if the numbers ascend by one step, else the numbers."""
    first = int(numbers[0])
    last = int(numbers[-1])
    step = int(numbers[1]) - first if len(numbers) > 1 else 1
    if step > 0 and bool((np.diff(numbers) == step).all()):
        return slice(first, last + 1, step)
    return numbers


def pick(
    runs: Sequence[Run], rows: int, samples: Mapping[int, RoutedExperts], layers: Sequence[int]
) -> RoutedExperts:
    """Return the routes of these layers in a rank's rows; rows of other samples, or past an end, lack one.

    The samples are alike in top-k and experts, as `find_bad` has it.
    """
    labels = arguments.labels(layers)
    like = next(iter(samples.values()))
    here = [run for run in runs if run.sample in samples]
    used = {run.sample: samples[run.sample] for run in here}
    topk = like.topk
    # Samples of one engine share their layers, so the columns are looked up once for each kind.
    columns = {
        of: routes.columns(labels)
        for of, routes in {routes.layers: routes for routes in used.values()}.items()
    }
    width = len(labels) * topk
    arrays = {
        number: (
            np.ascontiguousarray(routes.ids.numpy()[:, columns[routes.layers]]).reshape(len(routes), width),
            routes.recorded.numpy(),
        )
        for number, routes in used.items()
    }
    # numpy asks for huge pages; torch uses small ones, whose page faults take longer than the copy.
    out = np.empty((rows, width), like.ids.numpy().dtype)
    flags = np.zeros(rows, np.bool_)
    for run in here:
        flat, marks = arrays[run.sample]
        run = run.first(len(flat))
        flags[run.rows] = marks[run.tokens]
        if isinstance(run.rows, slice) and isinstance(run.tokens, slice):
            out[run.rows] = flat[run.tokens]
        else:
            _records(out)[run.rows] = _records(flat)[run.tokens]
    if not flags.all():  # rows that no run has written, or that have no route in their sample
        out[~flags] = 0
    return like.with_rows(
        torch.from_numpy(out).view(rows, len(labels), topk),
        torch.from_numpy(flags),
        layers=tuple(labels),
        **arguments.known_of_all(used.values()),
    )


def _records(flat: Array) -> Array:
    """View each row as one item, [tokens], which numpy moves as a whole when it looks rows up."""
    return flat.view(f"V{flat.shape[1] * flat.itemsize}")[:, 0] if flat.shape[1] else flat


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
