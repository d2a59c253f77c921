"""observe where experts drop tokens; test_contract.py holds it against hooks, on each stack."""

from __future__ import annotations

import pytest
import torch

import npu_replay
from npu_replay import RoutedExperts
from zoo.toys import ROWS, ToyModel, ToyRouter, plain, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")


def dropping(rows: list[int]) -> ToyModel:
    """A model whose first layer drops the last expert of these rows, as over a capacity."""

    def select(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = plain(router, scores)
        ids = ids.clone()
        ids[rows, -1] = ids[rows, 0]
        return values, ids

    return ToyModel(ToyRouter(0, select=select), ToyRouter(1))


def seen(model: ToyModel, *seeds: int) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.observe(model) as observation:
        for seed in seeds:
            model(tokens(seed))
    return observation.shown


def test_dropped_experts_are_missing_from_what_compare_takes() -> None:
    """Rows with a dropped expert were left out on both sides: 0.0 where other experts ran."""
    whole, some, others = (seen(dropping(rows), 0, 1) for rows in ([], [2, 5], [5, 7]))
    assert npu_replay.compare(whole, whole).differing == 0
    for one in (some, some[0]):  # what was dropped in both is the same
        assert npu_replay.compare(one, one).differing == 0
    found = npu_replay.compare(some, whole)
    # Two rows of each micro-batch in the first layer; the other layer's inputs change with them.
    assert (round(found.layer_mismatch[0], 6), found.token_layers) == (0.2, 2 * 2 * ROWS)
    assert npu_replay.compare(some, others).layer_mismatch[0] == pytest.approx(0.2)
    first = [one.only([0]) for one in some]
    assert npu_replay.compare(first, whole).differing == 4
    assert npu_replay.compare(some[0], whole[0]).differing >= 2
    assert not some[0].recorded[[2, 5]].any()  # they can't be replayed
    assert int(some[0].recorded.sum()) == ROWS - 2
