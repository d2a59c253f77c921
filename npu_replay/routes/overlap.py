"""Judges how far given routes overlap with what the routers would choose themselves: numpy alone.

Overlap is the share of the experts given to a router that it would choose by itself, too. Routes of the
right tokens overlap by 0.8 to 1, since rounding changes few experts. Routes of another token, layer or
sample overlap by chance. Chance depends on how evenly the experts are used, so it is measured: as the
overlap of each token's routes with the choices of all other tokens (docs/dev/overlap.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from npu_replay.routes.checks import Array

RUN = 64
"""The least number of judged rows, and the length of judged runs of consecutive tokens."""
_LEAST = 0.15
_MOST = 0.25
"""Limits of the expected overlap, as a part of the way from chance to 1.

Right routes at 4 bits had 0.19 and more, wrong ones less than 0.1, a wrong layer among right ones up to 0.2.
"""
_SHIFTS = 64
_LAYERS = 4  # number of layers compared for a shift
_SEQUENCES = 8  # number of sequences that are searched for a shift, those with the lowest overlap
_ALIKE = 0.9  # rows that share so much in all layers are of one token, but for near ties
_PAIRS = 512  # number of pairs of rows that are compared for that
_GAIN = 0.03  # a shift must overlap by so much more: texts that repeat themselves fit alike when moved


@dataclass(frozen=True)
class Judged:
    """Holds what routers were given and would choose, in the order of tokens.

    Attributes:
        given, own: ids [rows, layers, topk].
        hits: [layers, rows], how many of the experts that a row was given are its own choice, too.
        loads: [layers, 2, num_experts], how many rows were given an expert, or would choose it.
        starts: ascending, the first row of each sequence.
    """

    given: Array
    own: Array
    hits: Array
    loads: Array
    starts: Array

    def followed_by(self, other: Judged) -> Judged:
        """Return the rows of both, of this one first."""
        return Judged(
            np.concatenate([self.given, other.given]),
            np.concatenate([self.own, other.own]),
            np.concatenate([self.hits, other.hits], axis=1),
            self.loads + other.loads,
            np.concatenate([self.starts, other.starts + len(self.given)]),
        )

    def chance(self) -> Array:
        """Return the overlap of each layer's rows with the own choice of other rows, [layers]."""
        # The pairs of a given and a chosen expert in different rows that are the same expert.
        count = len(self.given)
        topk = self.given.shape[2]
        pairs = (self.loads[:, 0] * self.loads[:, 1]).sum(axis=1) - self.hits.sum(axis=1, dtype=np.int64)
        chance: Array = pairs / (topk * count * max(1, count - 1))
        return chance


@dataclass(frozen=True)
class Misfit:
    """Says why routes can't be those of their tokens.

    Attributes:
        layers: columns of the layers that overlap too little; else `first` begins the rows that do.
        first: the first of 64 rows, or of the rows that are moved; None for whole layers.
        got, least, chance: the overlap, its floor, and what chance gives there.
        shift: by how many rows they would have to be moved to fit; 0 for none.
        there: the overlap that they would have then.
    """

    got: float
    least: float
    chance: float
    layers: tuple[int, ...] = ()
    first: int | None = None
    shift: int = 0
    there: float = 0.0


def judge(rows: Judged, *, least: float | None = None, before: int = 0, moved: bool = False) -> Misfit | None:
    """Judge 64 rows or more by their overlap: return why they can't be right, or None.

    Args:
        least: the overlap below which they are refused; None for a part of the way from chance to 1.
        before: the number of rows of earlier micro-batches, which are judged only by layer.
        moved: the weights have changed since the routes were made, so rows may rightly be far off; only a
            shift after which they fit well is then a fault.
    """
    if moved and least is None:
        mean = float(rows.chance().mean())
        return find_shift(rows, before, (1 + mean) / 2, mean)
    shares, chance = rows.hits / rows.given.shape[2], rows.chance()
    overlap = shares.mean(axis=1)
    # A quarter of the best layer's way: a coarsely quantized rollout lowers all layers. A wrong layer lowers
    # those behind it too, since their inputs come from other experts; those before it stay high.
    best = ((overlap - chance) / np.maximum(1 - chance, 1e-9)).max()

    def floor_of(chance: Array, shares: Array, count: float) -> Array:
        """Return the expected overlap, less two standard errors of so many rows; shares are [..., rows]."""
        way = float(np.clip(best / 4, _LEAST, _MOST))
        expected = chance + way * (1 - chance) if least is None else least
        floor: Array = expected - 2 * shares.std(axis=-1) / np.sqrt(count)
        return floor

    floor = floor_of(chance, shares, shares.shape[1])
    low = np.flatnonzero(overlap < floor)
    if len(low) and least is None:
        low = low[
            [overlap[layer] < floor[layer] - _error_of_few(rows.own, rows.hits[[layer]]) for layer in low]
        ]
    misfit = None
    if len(low):
        worst = low[(overlap - floor)[low].argmin()]
        columns = tuple(low.tolist())
        misfit = Misfit(float(overlap[worst]), float(floor[worst]), float(chance[worst]), layers=columns)
    each = shares[:, before:].mean(axis=0)
    if misfit is None and len(each) >= RUN:  # the lowest of all runs of consecutive tokens
        sums = np.concatenate([[0.0], each.cumsum()])
        runs = (sums[RUN:] - sums[:-RUN]) / RUN
        at = int(runs.argmin())
        # Or the best run's way: wrong rows in one place lower all layers, and not the runs in other places.
        best = max(best, (runs.max() - chance.mean()) / max(1 - chance.mean(), 1e-9))
        run = each[at : at + RUN]
        there = slice(before + at, before + at + RUN)
        limit = float(floor_of(chance.mean(), run, RUN))
        if least is None and run.mean() < limit:
            limit -= _error_of_few(rows.own[there], rows.hits[:, there])
        if run.mean() < limit:
            misfit = Misfit(float(run.mean()), limit, float(chance.mean()), first=before + at)
    # Wrong rows match a little better at almost every offset, so report a shift only if the match is good.
    mean = float(chance.mean())
    return find_shift(rows, before, (1 + mean) / 2 if misfit else mean, mean) or misfit


def _error_of_few(own: Array, hits: Array) -> float:
    """Return how much more two standard errors are where most rows choose alike; 0 where they differ.

    If one token is repeated, all rows are one, and chance equals their overlap: one near tie then lowers a
    whole layer. `own` is [rows, layers, topk]; `hits` are those of the layers in question, [layers, rows].
    """
    topk = own.shape[2]
    some = np.random.default_rng(0).permutation(len(own))[:_PAIRS]
    pairs = own[some, :, :, None] == own[np.roll(some, 1), :, None, :]
    alike = float((pairs.mean(axis=(1, 2, 3)) * topk > _ALIKE).mean())
    if alike < 1 / 4:
        return 0.0
    got = float(hits.mean()) / topk
    # At least a sixteenth: of a few experts all or none may be shared.
    return 2 * math.sqrt(max(got * (1 - got), 1 / 16) / (topk * len(hits)) * alike)


def find_shift(rows: Judged, before: int, fits: float, chance: float) -> Misfit | None:
    """Find rows that fit better when they are moved, among those with the lowest overlap.

    Neighbouring tokens choose alike, so moved rows must overlap by four standard errors more, and by `fits`.
    Compares up to 256 rows of each of some sequences, in some layers.
    """
    count = rows.hits.shape[1]
    each = rows.hits[:, before:].mean(axis=0) / rows.given.shape[2]
    bounds = [*(max(start - before, 0) for start in rows.starts.tolist()), count - before]
    long = [(first, end) for first, end in pairwise(bounds) if end - first >= RUN]
    if not long and len(each) >= RUN:
        long = [(0, len(each))]  # short sequences: all of them as one
    long.sort(key=lambda span: float(each[slice(*span)].mean()))
    best: Misfit | None = None
    for first, end in long[:_SEQUENCES]:
        sums = np.concatenate([[0.0], each[first:end].cumsum()])
        at = first + int((sums[RUN:] - sums[:-RUN]).argmin())
        at = max(first, min(at, end - 4 * RUN))
        misfit = _moved(rows, before + at, (before + first, before + end), fits, chance)
        if misfit is not None and (best is None or misfit.there > best.there):
            best = misfit
    return best


def _moved(rows: Judged, at: int, span: tuple[int, int], fits: float, chance: float) -> Misfit | None:
    """Find by how much 256 rows from `at` on, in a sequence of this span, are moved."""
    some = slice(None, None, max(1, -(-rows.own.shape[1] // _LAYERS)))
    end = min(at + 4 * RUN, span[1])
    low = max(span[0], at - _SHIFTS)
    high = min(span[1], end + _SHIFTS)
    here = _one_hot(rows.own[at:end, some], rows.loads.shape[2])
    there = _one_hot(rows.given[low:high, some], rows.loads.shape[2])
    overlaps = here @ there.T / rows.given[0, some].size  # [rows here, rows there]
    now = overlaps.diagonal(at - low)
    best = None
    for shift in range(-_SHIFTS, _SHIFTS + 1):
        offset = at - low + shift
        moved = overlaps.diagonal(offset)
        if shift == 0 or len(moved) < 0.75 * (end - at):
            continue
        kept = now[max(0, -offset) :][: len(moved)]
        gain = moved - kept
        mean = float(moved.mean())
        if gain.mean() > max(_GAIN, 4 * gain.std() / math.sqrt(len(gain))) and mean > fits:
            fits = mean
            best = Misfit(float(kept.mean()), mean, chance, first=at, shift=-shift, there=mean)
    return best


def _one_hot(ids: Array, num_experts: int) -> Array:
    """Return rows of ones at their experts, float32 [rows, layers * num_experts]."""
    rows, layers, _ = ids.shape
    flat = np.zeros((rows, layers * num_experts), np.float32)
    at = ids.astype(np.int64) + np.arange(layers)[:, None] * num_experts
    np.put_along_axis(flat, at.reshape(rows, -1), 1.0, axis=1)
    return flat
