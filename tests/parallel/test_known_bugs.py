"""Bugs of other routing replays, as they would show in a whole record and replay: layers, rows, widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import RoutedExperts, TokenLayout
from npu_replay.errors import MicroBatchError
from zoo.toys import ToyModel, ToyRouter, foreign, recorded, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")


def shown(model: ToyModel, rows: torch.Tensor, routes: RoutedExperts) -> RoutedExperts:
    """What the routers chose while `routes` were replayed."""
    with torch.no_grad(), npu_replay.observe(model) as seen, npu_replay.replay(model, [routes]):
        model(rows)
    return seen.shown[0]


def test_columns_of_dense_layers_do_not_shift_the_others() -> None:
    """T2: the engine reports all six layers; routers sit in layers 1, 3 and 4."""
    model = ToyModel(ToyRouter(layer=1), ToyRouter(layer=3), ToyRouter(layer=4))
    (everything,) = foreign(layers=6)
    seen = shown(model, tokens(), everything)
    assert seen.layers == (1, 3, 4)
    assert torch.equal(seen.ids.sort(dim=2).values, everything.ids[:, [1, 3, 4]].sort(dim=2).values)


def test_rows_padded_to_another_multiple_are_refused_by_the_first_router() -> None:
    """T27: padded to a multiple of 8 by the layout and of 4 by the trainer."""
    laid_out = TokenLayout.packed([9], align=8).gather(foreign(rows=9))
    message = "(?s)micro-batch 0, layer 0.*Expected 12 rows, got 16.*padding.*TokenLayout does that"
    with pytest.raises(MicroBatchError, match=message):
        shown(ToyModel(), tokens(0, 12), laid_out)


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (512, torch.int16)])
def test_expert_ids_above_255_survive_record_layout_and_replay(
    experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: in a byte, expert 300 would be expert 44."""
    monkeypatch.setattr("zoo.toys.EXPERTS", experts)
    model = ToyModel(ToyRouter())
    live: list[Any] = []
    handle = model.layers[0].router.register_forward_hook(lambda _, __, output: live.append(output[1]))
    (native,) = recorded(model)
    handle.remove()
    assert native.ids.dtype == dtype
    assert torch.equal(native.ids[:, 0].long(), live[0])
    high = torch.arange(experts - 3, experts).repeat(10, 1, 1)
    layout = TokenLayout.padded([6, 4], order="batch")
    given = RoutedExperts(ids=high, layers=(0,), num_experts=experts)
    gathered = layout.gather(TokenLayout.packed([6, 4]).scatter(given))
    assert gathered.ids.dtype == dtype
    ids = shown(model, tokens(4, 12), gathered).ids[layout.rows >= 0]
    assert torch.equal(ids.long().sort(dim=2).values, high)
