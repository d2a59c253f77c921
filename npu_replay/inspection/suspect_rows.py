"""Which rows of an array of expert ids look wrong, layer by layer; and the load of its experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from npu_replay.routes import checks
from npu_replay.routes.checks import Array

STUCK_ROWS = 16
"""So many rows on end with the same experts in one layer are shown as stuck."""


class Cell(IntEnum):
    """What one row shows in one layer; the larger one wins where several hold."""

    DENSE = 0
    GOOD = 1
    NO_ROUTE = 2
    COPY = 3
    STUCK = 4
    ZEROS = 5
    TWICE = 6
    OUTSIDE = 7
    SHIFTED = 8
    REFUSED = 9

    @property
    def word(self) -> str:
        """What it is called: «route», «no route»."""
        return "route" if self is Cell.GOOD else self.name.lower().replace("_", " ")


MEANINGS = {
    "copy": "the experts of an earlier row, in all layers",
    "stuck": f"the same experts in {STUCK_ROWS} rows or more on end",
    "zeros": "never written",
    "twice": "an expert is named twice",
    "outside": "an id that is no expert",
    "shifted": "a dense layer has experts",
}
"""Of the words for what is wrong."""


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """One sequence's array, as it came.

    Attributes:
        ids: [rows, columns, topk], any integers.
        layers: the decoder layer of each column.
        num_experts: of a layer.
        dense: those of the layers that have no experts.
        recorded: [rows] bool, the rows that are said to have a route; None for all.
        tokens: [rows], the token of each row; None where nobody knows.
        first: the token that the first row is of.
    """

    ids: Array
    layers: tuple[int, ...]
    num_experts: int
    dense: frozenset[int] = frozenset()
    recorded: Array | None = None
    tokens: Array | None = None
    first: int = 0

    @property
    def routed(self) -> list[int]:
        """The columns that have experts."""
        return [column for column, layer in enumerate(self.layers) if layer not in self.dense]

    @property
    def known(self) -> Array:
        """[rows] bool, `recorded` written out."""
        return np.ones(len(self.ids), bool) if self.recorded is None else self.recorded


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """One decoder layer, over all rows that were looked at. Shares are of one, entropy is in bits."""

    layer: int
    rows: int
    """Rows with a route that can be read."""
    used: int
    """Experts that any of them names."""
    busiest: int | None
    busiest_share: float
    entropy: float
    repeated: int
    """Rows with the experts of the row before."""
    wrong: dict[str, int]
    """Of each kind of cell that is suspect (a key of MEANINGS), how many."""


def cells(view: View) -> Array:
    """What each row shows in each layer, uint8 [rows, columns], values of `Cell`.

    >>> cells(View(ids=np.array([[[0, 1]], [[0, 0]], [[3, 3]]]), layers=(5,), num_experts=4)).T
    array([[1, 5, 6]], dtype=uint8)
    """
    ids, known = view.ids, view.known
    found = np.full(ids.shape[:2], Cell.GOOD, np.uint8)
    if not found.size:
        return found
    for column in range(found.shape[1]):
        found[_stuck(_as_before(ids[:, column])), column] = Cell.STUCK
    if ids.shape[2] > 1:  # with a top-k of 1, zero is expert 0
        rows, columns = checks.named_twice(ids, known).T
        found[rows, columns] = Cell.TWICE
        found[~ids.any(axis=2)] = Cell.ZEROS
    rows, columns, _ = checks.outside(ids, view.num_experts, known).T
    found[rows, columns] = Cell.OUTSIDE
    _mark_copies(view, found)
    found[~known] = Cell.NO_ROUTE
    for column, layer in enumerate(view.layers):
        if layer in view.dense:
            found[:, column] = np.where(known & ids[:, column].any(axis=1), Cell.SHIFTED, Cell.DENSE)
    return found


def _as_before(ids: Array) -> Array:
    """[rows] bool: has a row the experts of the row before?"""
    same = np.zeros(len(ids), bool)
    same[1:] = (ids[1:] == ids[:-1]).all(axis=1)
    return same


def _stuck(as_before: Array) -> Array:
    """[rows] bool: is a row one of STUCK_ROWS or more that are the same?"""
    lengths = np.diff(np.flatnonzero(~as_before), append=len(as_before))
    return np.repeat(lengths >= STUCK_ROWS, lengths)


def _mark_copies(view: View, found: Array) -> None:
    """Rows that are an earlier token's in all layers."""
    routed = view.routed
    rows = np.flatnonzero(view.known & ~(found[:, routed] == Cell.ZEROS).all(axis=1))
    if not routed or not len(rows):
        return
    tokens = np.arange(len(rows)) if view.tokens is None else view.tokens[rows]
    copies = rows[checks.repeated_rows(view.ids[rows][:, routed], tokens)]
    there = found[copies]
    found[copies] = np.where(there == Cell.GOOD, np.uint8(Cell.COPY), there)


@dataclass
class Tally:
    """Adds up views: the load of each layer and what is wrong in it."""

    load: dict[int, Array] = field(default_factory=dict)
    """By layer: how many rows named each expert."""
    kinds: dict[int, Array] = field(default_factory=dict)
    """By layer: how many cells of each kind."""
    repeated: dict[int, int] = field(default_factory=dict)
    num_experts: int = 0
    """The most that a view has in a layer."""

    def add(self, view: View) -> Array:
        """Count a view in; returns its cells."""
        found = cells(view)
        self.num_experts = max(self.num_experts, view.num_experts)
        for column, layer in enumerate(view.layers):
            kinds = np.bincount(found[:, column], minlength=len(Cell))
            self.kinds[layer] = self.kinds.get(layer, 0) + kinds
            if layer in view.dense:
                continue
            readable = view.known & ~np.isin(found[:, column], (Cell.ZEROS, Cell.OUTSIDE))
            before = self.load.get(layer, np.zeros(0, np.int64))
            ids = view.ids[readable, column].reshape(-1).astype(np.int64)
            self.load[layer] = np.bincount(ids, minlength=max(view.num_experts, len(before)))
            self.load[layer][: len(before)] += before
            repeated = int((_as_before(view.ids[:, column]) & readable).sum())
            self.repeated[layer] = self.repeated.get(layer, 0) + repeated
        return found

    def figures(self) -> tuple[LayerFigures, ...]:
        """One a layer that has experts, or should have none and has; ascending."""
        return tuple(
            self._figures(layer)
            for layer in sorted(self.kinds)
            if layer in self.load or self.kinds[layer][Cell.SHIFTED]
        )

    def _figures(self, layer: int) -> LayerFigures:
        kinds = self.kinds[layer]
        load = self.load.get(layer, np.zeros(0, np.int64))
        named = int(load.sum())
        shares = load[load > 0] / max(1, named)
        return LayerFigures(
            layer=layer,
            rows=int(kinds[[Cell.GOOD, Cell.COPY, Cell.STUCK, Cell.TWICE]].sum()),
            used=int((load > 0).sum()),
            busiest=int(load.argmax()) if named else None,
            busiest_share=float(load.max() / named) if named else 0.0,
            entropy=-math.fsum(shares * np.log2(shares)),
            repeated=self.repeated.get(layer, 0),
            wrong={kind.word: int(kinds[kind]) for kind in Cell if kind >= Cell.COPY and kinds[kind]},
        )
