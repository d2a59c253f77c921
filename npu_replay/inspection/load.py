"""Count how often each expert of a layer was named, over all sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer.

    Attributes:
        layer: 0-based, of the decoder.
        rows: with a route.
        used: experts that were named at all.
        busiest, busiest_share: the expert that was named most, and its share of all.
        entropy: of the shares, in bits; log2 of num_experts where all are used alike.
    """

    layer: int
    rows: int
    used: int
    busiest: int
    busiest_share: float
    entropy: float


class Loads:
    """Counts of all layers.

    Attributes:
        num_experts: the most of any routes added.
        counts: int64 [num_experts] of each layer.
    """

    def __init__(self) -> None:
        self.num_experts = 0
        self.counts: dict[int, Array] = {}
        self._rows: dict[int, int] = {}

    def add(self, routes: RoutedExperts) -> None:
        """Count the experts of a sequence in."""
        self.num_experts = max(self.num_experts, routes.num_experts)
        recorded = routes.recorded.numpy()
        rows = int(recorded.sum())
        ids = routes.ids.numpy()[recorded]
        for column, layer in enumerate(routes.layers):
            counted = np.bincount(ids[:, column].ravel(), minlength=self.num_experts)
            before = self.counts.get(layer, np.zeros(0, np.int64))
            self.counts[layer] = np.pad(before, (0, len(counted) - len(before))) + counted
            self._rows[layer] = self._rows.get(layer, 0) + rows

    def figures(self) -> tuple[LayerLoad, ...]:
        """Return the figures of each layer, ascending."""
        return tuple(self._figure(layer) for layer in sorted(self.counts))

    def _figure(self, layer: int) -> LayerLoad:
        counts = self.counts[layer]
        shares = counts[counts > 0] / max(1, counts.sum())
        return LayerLoad(
            layer=layer,
            rows=self._rows[layer],
            used=len(shares),
            busiest=int(counts.argmax()),
            busiest_share=float(shares.max(initial=0)),
            entropy=abs(float(-(shares * np.log2(shares)).sum())),
        )
