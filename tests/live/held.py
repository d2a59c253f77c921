"""Rows held against the truth of `families`, and replayed as a trainer does."""

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


def assert_right(model: Any, tokens: Any, routes: RoutedExperts, start: int = 0) -> int:
    """Hold all rows from `start` on, but the last, against what `model` chooses behind the same experts.

    Those that are left out have to be without a route. A token-layer may differ in a tie. What an engine took
    before `start` isn't known: a tie there may have fallen otherwise, and then the rest can't be judged.

    Returns:
        How many ties fell otherwise.
    """
    tokens = np.asarray(tokens).tolist()
    assert len(routes) == len(tokens)
    assert routes.fingerprint == fingerprint(tokens)
    assert routes.recorded.tolist() == [start <= row < len(tokens) - 1 for row in range(len(tokens))]
    rows = slice(start, len(tokens) - 1)
    ids = routes.ids.numpy()[rows]
    true = truth(model, tokens, ids, start)
    differ = (np.sort(ids, axis=2) != true.ids[rows]).any(axis=2)
    wrong = np.argwhere(differ & ~true.tie[rows])
    if len(wrong) and true.tie[:start].any():
        return 1
    assert not len(wrong), f"{len(wrong)} of {differ.size} token-layers are wrong, first {wrong[0].tolist()}"
    ties = int(differ.sum())
    assert ties <= 1 + MOST_TIES * differ.size
    return ties


def look(model: Any, tokens: Any, routes: RoutedExperts) -> float:
    """Replay the routes as a trainer does; return live_mismatch, the share of token-layers that differ."""
    with torch.no_grad(), npu_replay.replay(model, [routes], live_mismatch=True) as session:
        model(torch.as_tensor(np.asarray(tokens))[None], use_cache=False)
    return session.metrics()["live_mismatch"]
