"""Picks a rank's rows out of its samples: a plan once, then one copy of what it has of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes
from npu_replay.routes import arguments
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts

_FEW = 8
"""The most runs per sample that are copied one by one; beyond, tokens are looked up singly."""


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
    """Return the runs of a layout, from the packed token of each row (int64, or -1) and the lengths."""
    given = rows.numpy()
    # Sorted by packed token, the tokens of a sample are neighbours. A run ends with its sample, or where a
    # number is skipped; with many skips one run has all tokens of its sample.
    order = np.argsort(given, kind="stable")
    order = order[np.searchsorted(given[order], 0) :]  # without the padding
    packed = given[order]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    of_sample = np.searchsorted(packed, starts)
    jumps = np.flatnonzero(np.diff(packed) != 1) + 1
    cuts = np.union1d(jumps, of_sample) if len(jumps) <= _FEW * len(lengths) else np.unique(of_sample)
    found = []
    for first, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        sample = int(np.searchsorted(starts, packed[first], side="right")) - 1
        tokens = packed[first:end] - starts[sample]
        found.append(Run(sample, _even(tokens), _even(order[first:end])))
    return found


def _even(numbers: Array) -> slice | Array:
    """Return a slice if the numbers ascend by one step, else the numbers."""
    first, last = int(numbers[0]), int(numbers[-1])
    step = int(numbers[1]) - first if len(numbers) > 1 else 1
    if step > 0 and bool((np.diff(numbers) == step).all()):
        return slice(first, last + 1, step)
    return numbers


def pick(
    runs: Sequence[Run], rows: int, samples: Mapping[int, RoutedExperts], layers: Sequence[int]
) -> RoutedExperts:
    """Return the routes of these layers in a rank's rows; rows of other samples, or past an end, lack one."""
    labels, like = arguments.labels(layers), next(iter(samples.values()))
    here = [run for run in runs if run.sample in samples]
    used = {run.sample: samples[run.sample] for run in here}
    topk, experts = like.topk, like.num_experts
    for number, one in used.items():
        if one.topk != topk or one.num_experts != experts:  # words are built only for an error
            raise InvalidRoutes(
                "the samples of a batch have another top-k or number of experts",
                where=f"sequence {number}",
                expected=f"top-{topk} of {experts}",
                got=f"top-{one.topk} of {one.num_experts}",
                cause="routes of different models",
            )
    columns = {of: one.columns(labels) for of, one in {one.layers: one for one in used.values()}.items()}
    width = len(labels) * topk
    given = {
        number: (one.ids.numpy()[:, columns[one.layers]].reshape(len(one), width), one.recorded.numpy())
        for number, one in used.items()
    }
    # numpy asks for huge pages; torch uses small ones, whose page faults take longer than the copy.
    out, flags = np.empty((rows, width), like.ids.numpy().dtype), np.zeros(rows, np.bool_)
    for run in here:
        flat, marks = given[run.sample]
        run = run.first(len(flat))
        flags[run.rows] = marks[run.tokens]
        if isinstance(run.rows, slice) and isinstance(run.tokens, slice):
            out[run.rows] = flat[run.tokens]
        else:
            _records(out)[run.rows] = _records(flat)[run.tokens]
    if not flags.all():
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
