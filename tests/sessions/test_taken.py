"""Blocks that are routers themselves: what takes in the ids of the top-k says whether they were used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.functional import one_hot

import npu_replay
from npu_replay.errors import NoEffect, RecomputeError
from npu_replay.seam import backward
from zoo.outcome import check_own_record
from zoo.toys import EXPERTS, ROWS, TOPK, ToyBlock, ToyModel, foreign, hooks, run, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")

Ids = torch.Tensor
Use = Callable[["Block", torch.Tensor, Ids], Ids]
"""What a block does with scores and ids: the ids that its experts get, as they get them."""


class Block(ToyBlock):
    """`use` is what lies between the top-k and the experts."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.got: list[Ids] = []
        self.figure: Callable[[torch.Tensor], object] = lambda scores: None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = (hidden @ self.weight.T).softmax(dim=-1)
        self.figure(scores)
        values, ids = torch.topk(scores, TOPK, dim=-1)
        chosen = self.use(self, scores, ids)
        with torch._C.DisableTorchFunction():  # as a kernel: nobody sees it
            self.got.append(chosen.detach().long().clone())
            mixed = torch.einsum("tk,tkhg,th->tg", values, self.experts[chosen.long()], hidden)
        return hidden + mixed.tanh()


def made(use: Use, recompute: str | None = None) -> ToyModel:
    return ToyModel(Block(use), Block(use), recompute=recompute)


def taken(model: ToyModel) -> list[list[Ids]]:
    """What the experts got, by layer and call."""
    return [layer.got for layer in model.layers]


def by_one_hot(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """As transformers 4 does."""
    return one_hot(ids, num_classes=EXPERTS).argsort(dim=-1, descending=True, stable=True)[..., 0]


def by_cast(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """A cast, and then a kernel."""
    return ids.to(torch.int32)


def by_pairs(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """Beside the ids lies an index of rows of the same shape."""
    rows = torch.arange(len(ids)).unsqueeze(1).expand(-1, TOPK)
    return torch.arange(EXPERTS).expand(len(ids), -1)[rows, ids]


USES = (by_one_hot, by_cast, by_pairs)


@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("use", USES)
def test_a_block_is_recorded_bit_equal_and_its_experts_get_the_routes(use: Use, recompute: str) -> None:
    model = made(use, recompute)
    run(model, 0, 1)
    own = [[ids.sort().values for ids in layer[:2]] for layer in taken(model)]
    routes = check_own_record(model, partial(run, model, 0, 1))
    for layer, wanted in enumerate(own):
        for number, ids in enumerate(wanted):
            assert torch.equal(routes[number].layer_ids(layer).long().sort().values, ids)
    others = foreign(2)
    for layer in taken(model):
        layer.clear()
    with npu_replay.replay(model, others):
        run(model, 0, 1)
    order = [0, 1] if recompute is None else [0, 1, 1, 0]  # backward begins with the last
    for layer, got in enumerate(taken(model)):
        assert [
            torch.equal(ids, others[n].layer_ids(layer).long()) for ids, n in zip(got, order, strict=True)
        ] == [True] * len(order)
    assert hooks(model) == 0


# Blocks that don't follow


def shifted(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    return by_one_hot(block, scores, (ids + 1) % EXPERTS)


def shifted_in_place(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    with torch.no_grad():
        ids.add_(1).remainder_(EXPERTS)
    return by_one_hot(block, scores, ids)


def other_columns(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """The same experts, but each with another's weight."""
    return by_one_hot(block, scores, ids.flip(1))


def another_choice(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """The experts are chosen by something else, beside a top-k whose ids serve a figure."""
    scores.gather(1, ids)
    return by_one_hot(block, scores, scores.argsort(dim=1)[:, :TOPK])


def right_too_late(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """The right ids serve a figure, when the experts have got others."""
    chosen = shifted(block, scores, ids)
    scores.gather(1, ids)
    return chosen


@pytest.mark.parametrize("use", [shifted, shifted_in_place, other_columns, another_choice, right_too_late])
@pytest.mark.parametrize("recording", [True, False])
def test_experts_that_get_other_ids_are_an_error(use: Use, recording: bool) -> None:
    model = made(use)
    block = npu_replay.record(model) if recording else npu_replay.replay(model, foreign())
    problem = (
        "were written into" if use is shifted_in_place else "goes on with other experts than its top-k gave"
    )
    match = rf"micro-batch 0, layer 0 \(layers\.0\).*{problem}"
    with pytest.raises(NoEffect, match=match), block:
        run(model)


def by_nothing(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """Only asked about, and given to no function of torch."""
    assert (ids.size(0), ids.dim(), ids.device.type) == (ROWS, 2, "cpu")
    return ids


def by_another_top_k(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
    """The first top-k that fits was another's; the experts' own lies in a kernel."""
    with torch._C.DisableTorchFunction():
        return scores.flip(1).argsort(dim=1)[:, :TOPK].contiguous()


@pytest.mark.parametrize("use", [by_nothing, by_another_top_k])
def test_ids_that_nothing_takes_in_are_an_error(use: Use) -> None:
    model = made(use)
    with pytest.raises(NoEffect, match="nothing takes in the ids"), npu_replay.replay(model, foreign()):
        run(model)


def test_a_block_that_begins_to_shift_is_found_in_the_next_micro_batch_that_is_checked() -> None:
    model = made(by_one_hot)
    with pytest.raises(NoEffect, match="micro-batch 4"), npu_replay.replay(model, foreign(8)):
        for number in range(8):
            model.layers[1].use = shifted if number > 2 else by_one_hot
            model(tokens(number))


def test_a_block_with_a_further_top_k_that_shifts_is_refused_in_any_micro_batch() -> None:
    def use(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
        assert torch.topk(scores * 1.0, TOPK).values.shape == ids.shape
        return (shifted if number == 3 else by_one_hot)(block, scores, ids)

    model = made(use)
    with pytest.raises(NoEffect, match="micro-batch 3"), npu_replay.replay(model, foreign(5)):
        for number in range(5):
            run(model, number)


def test_ids_that_a_block_writes_into_in_a_recompute_alone_are_refused() -> None:
    """A non-reentrant checkpoint stops before the block's end, and nobody looks."""

    def writes_again(block: Block, scores: torch.Tensor, ids: Ids) -> Ids:
        return (shifted_in_place if backward.in_backward() else by_one_hot)(block, scores, ids)

    model = made(writes_again, "reentrant")
    with pytest.raises(RecomputeError, match="other experts"), npu_replay.replay(model, foreign()):
        run(model)


# Cost, and what else may be around


def test_observe_shows_what_the_experts_of_a_block_get() -> None:
    model = made(by_one_hot)
    routes = foreign(2)
    with npu_replay.observe(model) as seen, npu_replay.replay(model, routes):
        run(model, 0, 1)
    assert npu_replay.compare(seen.shown, routes).differing == 0
    with npu_replay.observe(made(shifted)) as observed:
        run(observed.chunks[0], 0)
    assert not observed.shown[0].recorded.all()
