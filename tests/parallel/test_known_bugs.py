"""Bugs of other routing replays, as they would show in a whole record and replay: layers, rows, widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from npu_replay import RoutedExperts, TokenLayout, routers
from npu_replay.errors import MicroBatchError
from npu_replay.routers import Router
from zoo.toys import EXPERTS, HIDDEN, TOPK, ToyModel, ToyRouter, hooks, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("toy_routers"),
]


def made_up(rows: int, layers: range | tuple[int, ...], seed: int = 5, **about: Any) -> RoutedExperts:
    """Routes that no router here would choose."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, len(layers), EXPERTS, generator=generator).topk(TOPK).indices
    return RoutedExperts(ids=ids, layers=layers, num_experts=EXPERTS, **about)


def shown(model: Any, chunks: list[ToyModel], rows: torch.Tensor, routes: RoutedExperts) -> RoutedExperts:
    """What the routers chose while `routes` were replayed."""
    with torch.no_grad(), npu_replay.observe(model) as seen, npu_replay.replay(model, [routes]):
        for chunk in chunks:
            chunk(rows)
    return seen.shown[0]


# Layers


def test_columns_of_dense_layers_do_not_shift_the_others() -> None:
    """T2: the engine reports all six layers; routers sit in layers 1, 3 and 4."""
    model = ToyModel(ToyRouter(layer=1), ToyRouter(layer=3), ToyRouter(layer=4))
    everything = made_up(10, range(6))
    seen = shown(model, [model], tokens(), everything)
    assert seen.layers == (1, 3, 4)
    assert npu_replay.compare(seen, everything).differing == 0
    assert torch.equal(seen.ids.sort(dim=2).values, everything.ids[:, [1, 3, 4]].sort(dim=2).values)


def test_a_second_model_is_neither_recorded_nor_replayed() -> None:
    """T18: a model that was built before (an orphan, a reference) has routers too, and nobody asks them."""
    orphan = ToyModel()
    model = ToyModel()
    reference = ToyModel()
    for one in (orphan, reference):
        nn.init.normal_(one.layers[0].router.weight)
    with torch.no_grad():
        natives = [one(tokens(1)) for one in (orphan, reference)]
        with npu_replay.record(model) as recording:
            orphan(tokens(1))
            model(tokens())
            reference(tokens(1))
    (recorded,) = recording.routes
    assert recorded.ids.shape == (10, 2, TOPK), "two routers of one model, not six of three"
    foreign = made_up(10, (0, 1))
    with torch.no_grad(), npu_replay.replay(model, [foreign]):
        replayed = model(tokens())
        for one, native in zip((orphan, reference), natives, strict=True):
            assert torch.equal(one(tokens(1)), native)
        with npu_replay.record(reference) as inner:  # nor does a block on another model end this one
            reference(tokens(1))
    assert not torch.equal(replayed, natives[0])
    assert len(inner.routes) == 1
    assert [hooks(one) for one in (orphan, model, reference)] == [0, 0, 0]


# Micro-batches


# Rows


def test_rows_padded_to_another_multiple_are_refused_by_the_first_router() -> None:
    """T27: padded to a multiple of 8 by the layout and of 4 by the trainer. T12: the response was cut."""
    model = ToyModel()
    cut = pytest.raises(MicroBatchError, match=r"micro-batch 0, layer 0.*Expected 7 rows, got 9")
    with cut, npu_replay.replay(model, [made_up(9, (0, 1))]):
        model(tokens(0, 7))
    laid_out = TokenLayout.packed([9], align=8).gather([made_up(9, (0, 1))])
    message = "(?s)micro-batch 0, layer 0.*Expected 12 rows, got 16.*padding.*TokenLayout does that"
    with pytest.raises(MicroBatchError, match=message), npu_replay.replay(model, [laid_out]):
        model(tokens(0, 12))


# Widths


class WideRouter(nn.Module):
    """More experts than a byte can tell apart."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, HIDDEN, generator=torch.Generator().manual_seed(2)))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk((hidden @ self.weight.T).softmax(dim=-1), TOPK, dim=-1)


class WideRouters(routers.RouterKind):
    def describe(self, module: nn.Module, path: str) -> Router | None:
        if not isinstance(module, WideRouter):
            return None
        experts = len(module.weight)

        def shows(output: object) -> torch.Tensor:
            return torch.zeros(len(output[1]), experts, dtype=torch.bool).scatter(1, output[1], True)

        return Router(module=module, num_experts=experts, topk=TOPK, shows=shows)


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (512, torch.int16)])
def test_expert_ids_above_255_survive_record_layout_and_replay(experts: int, dtype: torch.dtype) -> None:
    """T19: in a byte, expert 300 would be expert 44."""
    routers.register("wide", WideRouters())
    try:
        model = WideRouter(experts)
        rows = tokens(3, 200)
        with torch.no_grad(), npu_replay.record(model) as recording:
            native = model(rows)[1]
        (recorded,) = recording.routes
        assert recorded.ids.dtype == dtype
        assert torch.equal(recorded.ids[:, 0].long(), native)
        assert int(recorded.ids.max()) > 200
        high = torch.arange(experts - 3, experts).repeat(200, 1, 1)
        given = RoutedExperts(ids=high, layers=(0,), num_experts=experts)
        layout = TokenLayout.padded([100, 60, 40], order="batch")
        gathered = layout.gather(TokenLayout.packed([100, 60, 40]).scatter(given))
        assert gathered.ids.dtype == dtype
        with torch.no_grad(), npu_replay.replay(model, [gathered]):
            ids = model(tokens(4, 300))[1]
        chosen = ids[layout.rows >= 0]
        assert torch.equal(chosen.sort(dim=1).values, high[:, 0])
    finally:
        routers.unregister("wide")
