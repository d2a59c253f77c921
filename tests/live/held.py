"""Rows held against the truth of `families`, and a trainer that refuses to step on wrong ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import npu_replay
from live.families import truth
from npu_replay import RoutedExperts, fingerprint

CEILING = 0.02
"""Engine and trainer are both float32, and differ in ties alone; one wrong layer of 24 is 4 %."""
MOST_TIES = 0.005
"""Of the token-layers of a sample. DeepSeek's experts, chosen by groups, lie close: 5 of 900 were seen."""


def assert_right(model: Any, tokens: Any, routes: RoutedExperts, start: int = 0, last: int = 1) -> int:
    """Hold all rows from `start` on, but the `last`, against what `model` chooses; those have to be without a
    route.

    A token-layer may differ in a tie, and behind one that fell otherwise: a later layer of that token or of a
    later one computes with what the other expert made. Such are a few.

    Returns:
        How many ties fell otherwise, of those that are behind no other.
    """
    tokens = np.asarray(tokens).tolist()
    assert len(routes) == len(tokens)
    assert routes.fingerprint == fingerprint(tokens)
    assert routes.recorded.tolist() == [start <= row < len(tokens) - last for row in range(len(tokens))]
    true, rows = truth(model, tokens), slice(start, len(tokens) - last)
    differ = (np.sort(routes.ids.numpy()[rows], axis=2) != true.ids[rows]).any(axis=2)
    fell = differ & true.tie[rows]
    behind = np.zeros_like(differ)
    behind[:, 1:] = np.logical_or.accumulate(np.logical_or.accumulate(fell, axis=0), axis=1)[:, :-1]
    wrong = np.argwhere(differ & ~fell & ~behind)
    assert not len(wrong), f"{len(wrong)} of {differ.size} token-layers are wrong, first {wrong[0].tolist()}"
    ties = int((fell & ~behind).sum())
    assert differ.sum() <= CEILING * max(differ.size, 1000)  # of a short text, a tie's wake may be a part
    assert ties <= 1 + MOST_TIES * differ.size
    return ties


class Trainer:
    """A model of transformers that learns from one sample at a time, with its routes.

    Attributes:
        steps: of the optimizer, so far.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps = 0
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(self, tokens: Any, routes: RoutedExperts) -> None:
        """Replay the routes in an update; where they are wrong, an error before the optimizer steps."""
        ids = torch.as_tensor(np.asarray(tokens))[None]
        self._optimizer.zero_grad()
        with npu_replay.replay(self.model, [routes], max_live_mismatch=CEILING):
            self.model(ids, labels=ids, use_cache=False).loss.backward()
        self._optimizer.step()
        self.steps += 1

    def look(self, tokens: Any, routes: RoutedExperts) -> None:
        """The same without an update."""
        with torch.no_grad(), npu_replay.replay(self.model, [routes], max_live_mismatch=CEILING):
            self.model(torch.as_tensor(np.asarray(tokens))[None], use_cache=False)
