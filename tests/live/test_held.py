"""The judge itself: a tie that fell otherwise is one, whatever comes behind it; anything else is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from live import families
from live.families import prompt, truth
from live.held import assert_right
from npu_replay import RoutedExperts, fingerprint

ROW = 7
LAYER = 1


def routes_with_another_expert(model: Any, tokens: list[int]) -> tuple[RoutedExperts, int]:
    """Rows of an engine that took one expert for another, once; and how many token-layers that changes."""
    own = truth(model, tokens).ids
    experts = int(own.max()) + 1
    unused = sorted(set(range(experts)) - set(own[ROW, LAYER].tolist()))
    ids = own.copy()
    for _ in range(own.shape[1]):  # each round, one layer more has what it chooses behind the others
        ids[ROW, LAYER, 0] = unused[0]
        ids = truth(model, tokens, ids).ids.copy()
        ids[ROW, LAYER] = own[ROW, LAYER]
    ids[ROW, LAYER, 0] = unused[0]
    routes = RoutedExperts(
        ids=ids,
        layers=range(own.shape[1]),
        num_experts=experts,
        recorded=np.arange(len(tokens)) < len(tokens) - 1,
        fingerprint=fingerprint(tokens),
    )
    return routes, int((np.sort(ids, axis=2) != own).any(axis=2).sum())


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_what_comes_behind_a_tie_is_judged_by_what_the_engine_took(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.make(family)
    tokens = prompt(0, 60)
    routes, others = routes_with_another_expert(model, tokens)
    assert others > 3, "an expert of an early layer changes what is behind it"
    with pytest.raises(AssertionError, match=rf"^1 of \d+ token-layers are wrong, first \[{ROW}, {LAYER}\]"):
        assert_right(model, tokens, routes)
    monkeypatch.setattr(families, "MARGIN", 10)
    assert assert_right(model, tokens, routes) == 1
