"""The effect is shown in every micro-batch, not in those alone that are checked as a whole.

What test_faults_in_any_micro_batch.py, which draws its schedules by chance, doesn't have: its hooks on the
routers keep their calls from being quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from npu_replay.errors import MicroBatchError, NoEffect, RecomputeError
from npu_replay.seam import backward
from npu_replay.seam.call import armed
from zoo.toys import (
    EXPERTS,
    ROWS,
    TOPK,
    ToyModel,
    ToyRouter,
    foreign,
    forwards,
    in_groups,
    opened,
    plain,
    run,
    same,
    tokens,
)

Pair = tuple[torch.Tensor, torch.Tensor]
Scores = torch.Tensor
UNCHECKED = (3, 7)


pytestmark = pytest.mark.usefixtures("toy_routers")


class Sometimes:
    """Selects in another way in one call of the router."""

    def __init__(self, other: Callable[[ToyRouter, Scores], Pair], at: int) -> None:
        self.other = other
        self.at = at
        self.calls = 0

    def __call__(self, router: ToyRouter, scores: Scores) -> Pair:
        self.calls += 1
        return (self.other if self.calls == self.at + 1 else plain)(router, scores)


def dropped(router: ToyRouter, scores: Scores) -> Pair:
    values, ids = plain(router, scores)
    return values, ids.masked_fill_(torch.arange(len(ids))[:, None] == 2, 0)


def behind_torchs_back(router: ToyRouter, scores: Scores) -> Pair:
    """As a kernel of somebody's does."""
    values, ids = plain(router, scores)
    ids.data.numpy()[:] = (ids.data.numpy() + 1) % EXPERTS
    return values, ids


def by_keyword(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The forward of a layer that names the router's argument."""
    values, ids = layer.router(hidden=hidden)
    return hidden + torch.einsum("tk,tkhg,th->tg", values, layer.experts[ids], hidden).tanh()


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS + 1])
@pytest.mark.parametrize("named", [False, True], ids=["", "by keyword"])
@pytest.mark.parametrize("at", [0, *UNCHECKED])
def test_routes_of_other_rows_are_refused_in_any_micro_batch(at: int, named: bool, rows: int) -> None:
    model = ToyModel()
    for layer in model.layers if named else ():
        layer.forward = by_keyword.__get__(layer)
    routes = foreign(9)
    routes[at : at + 1] = foreign(rows=rows)
    expected = rf"micro-batch {at}, layer 0.*number of tokens.*Expected {ROWS} rows, got {rows} in the routes"
    with (
        pytest.raises(MicroBatchError, match=expected),
        torch.no_grad(),
        npu_replay.replay(model, routes, min_overlap=0),
    ):
        forwards(model, *range(9))


@pytest.mark.parametrize("kind", ["record", "replay"])
@pytest.mark.parametrize("at", UNCHECKED)
def test_a_router_that_is_called_twice_is_refused_in_any_micro_batch(at: int, kind: str) -> None:
    model = ToyModel()
    refused = pytest.raises(MicroBatchError, match=f"micro-batch {at}, layer 0.*called again")
    with refused, torch.no_grad(), opened(kind, model, 9):
        for number in range(9):
            if number == at:
                model.layers[1].register_forward_hook(lambda *_: (model.layers[0].router(tokens()), None)[1])
            model(tokens(number))


def test_a_router_that_is_called_behind_a_forward_that_raised_is_told() -> None:
    """Its quick call was made for that forward."""
    model = ToyModel()
    wrong = pytest.raises(MicroBatchError, match="not through the __call__")
    with wrong, torch.no_grad(), npu_replay.record(model):
        forwards(model, *range(3))
        hook = model.layers[0].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(3))
        hook.remove()
        model.layers[1].router(tokens(3))
        model(tokens(3))


def test_a_record_of_ids_that_a_kernel_wrote_into_is_what_was_used() -> None:
    used = []

    def writes(router: ToyRouter, scores: Scores) -> Pair:
        pair = behind_torchs_back(router, scores)
        used.append(pair[1].clone())
        return pair

    model = ToyModel(ToyRouter(), ToyRouter(select=Sometimes(writes, 3)))
    with torch.no_grad(), npu_replay.record(model) as recording:
        forwards(model, *range(5))
    assert torch.equal(recording.routes[3].layer_ids(1).long(), used[0])


def flipped(router: ToyRouter, scores: Scores) -> Pair:
    """Written in place: the output shows the same experts, each with another's weight."""
    values, ids = plain(router, scores)
    return values, ids.copy_(ids.flip(1))


def shifted(router: ToyRouter, scores: Scores) -> Pair:
    values, ids = plain(router, scores)
    return values, (ids + 1) % EXPERTS


@pytest.mark.choice
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("block", "other", "rows"),
    [
        ("record", dropped, ROWS),
        ("record", dropped, 44_000),  # above 131,072 ids
        pytest.param("replay", dropped, 44_000, marks=pytest.mark.slow),
        pytest.param("record", shifted, 70_000, marks=pytest.mark.slow),  # above 2**20 numbers in the output
        ("record", shifted, ROWS),
        ("replay", shifted, ROWS),
        ("replay", flipped, ROWS),
    ],
)
def test_other_ids_than_those_of_the_top_k_are_refused_in_every_size_and_mode(
    block: str, other: Any, rows: int, mode: Any
) -> None:
    model = ToyModel(ToyRouter(), ToyRouter(select=Sometimes(other, 3)))
    wrong = pytest.raises(NoEffect, match="micro-batch 3, layer 1")
    with wrong, mode(), opened(block, model, 5, rows=rows):
        for seed in range(5):
            model(tokens(seed, rows))


def with_another(router: ToyRouter, scores: Scores) -> Pair:
    """The experts of the top-k, and one that it didn't choose."""
    values, ids = plain(router, scores)
    least, other = scores.min(dim=1, keepdim=True)
    return torch.cat([values, least], dim=1), torch.cat([ids, other], dim=1)


@pytest.mark.parametrize("block", ["record", "replay"])
@pytest.mark.parametrize("at", [0, 1, 2, 4, 8])
def test_an_output_that_shows_one_expert_more_is_refused_where_all_is_read(at: int, block: str) -> None:
    """In the micro-batches between them it isn't seen (docs/dev/notes.md)."""
    model = ToyModel(ToyRouter(), ToyRouter(select=Sometimes(with_another, at)))
    refused = pytest.raises(NoEffect, match=f"micro-batch {at}, layer 1.*doesn't show the chosen experts")
    with refused, torch.no_grad(), opened(block, model, 10):
        forwards(model, *range(10))


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_experts_that_change_their_weights_in_a_recompute_alone_are_refused(how: str, at: int) -> None:
    running: list[int] = []

    def flips(router: ToyRouter, scores: Scores) -> Pair:
        return (flipped if backward.in_backward() and running[-1] == at else plain)(router, scores)

    model = ToyModel(ToyRouter(), ToyRouter(select=flips), recompute=how)
    refused = pytest.raises(RecomputeError, match=f"micro-batch {at}, layer 1")
    with refused, npu_replay.replay(model, foreign(5)):
        for number in range(5):
            running.append(number)
            run(model, number)


@pytest.mark.parametrize("block", ["record", "replay"])
def test_ids_that_the_layer_writes_into_behind_its_router_are_refused(block: str) -> None:
    model = ToyModel()
    calls = []

    def writes(router: nn.Module, args: Any, output: Pair) -> None:
        calls.append(1)
        if len(calls) == 4:
            output[1][0] = output[1][0].roll(1)

    model.layers[1].router.register_forward_hook(writes)
    words = r"micro-batch 3, layer 1 .*were written into"
    with pytest.raises(NoEffect, match=words), torch.no_grad(), opened(block, model, 5):
        forwards(model, *range(5))


class Penalized(ToyModel):
    """Takes a gradient inside its forward, which runs its checkpoints again before the forward has ended."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = super().forward(hidden)
        (slope,) = torch.autograd.grad(output.square().sum(), hidden)
        return output + slope


@pytest.mark.parametrize("kind", ["pin_recompute", "replay"])
def test_a_gradient_inside_the_forward_is_a_recompute_in_any_micro_batch(kind: str) -> None:
    model = Penalized(recompute="non-reentrant")
    with opened(kind, model, 5) as session:
        for number in range(5):
            model(tokens(number).requires_grad_())
    assert session.metrics()["micro_batches"] == 5


def among_others(router: ToyRouter, scores: Scores) -> Pair:
    """Asks for fewer, and for the least experts, before its own top-k and behind it, as for a figure."""
    assert torch.topk(scores, TOPK - 1, dim=-1)[1].shape == (ROWS, TOPK - 1)
    least = scores.argsort(dim=1)[:, :TOPK]
    assert torch.equal(torch.topk(scores, TOPK, dim=-1, largest=False)[1], least)
    pair = plain(router, scores)
    assert torch.equal(torch.topk(-scores, TOPK, dim=-1)[1], least)
    return pair


@pytest.mark.parametrize("block", ["record", "replay"])
@pytest.mark.parametrize("at", [0, *UNCHECKED])
def test_other_top_ks_in_one_micro_batch_are_the_routers_own(at: int, block: str) -> None:
    select = Sometimes(among_others, at)
    model = ToyModel(ToyRouter(select=select), ToyRouter())
    with opened(block, model, 9):
        run(model, *range(9))
    assert select.calls == 9


@pytest.mark.parametrize("block", ["record", "replay"])
def test_a_router_that_raises_is_left_in_any_micro_batch(block: str) -> None:
    """Else the next top-k of the same shape would be answered, whoever calls it."""

    def raises(router: ToyRouter, scores: Scores) -> Pair:
        raise ArithmeticError

    model = ToyModel(ToyRouter(select=Sometimes(raises, 3)), ToyRouter())
    with pytest.raises(ArithmeticError), torch.no_grad(), opened(block, model, 5):
        forwards(model, *range(5))
    assert armed() is None


class Before(nn.Module):
    """Runs the backwards that are due, in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        while self.due:
            self.due.pop().backward()
        return hidden


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_backward_inside_the_next_forward_recomputes_its_own(how: str) -> None:
    grads = []
    for inside in (False, True):
        before = Before()
        model = ToyModel(ToyRouter(), before, ToyRouter(), recompute=how)
        with npu_replay.replay(model, foreign(6)):
            for seed in range(6):
                output = model(tokens(seed).requires_grad_())
                before.due.append(output.sum())
                if not inside or seed == 5:
                    before(output)
        grads.append([parameter.grad for parameter in model.parameters()])
    assert same(*grads)


def test_a_forward_that_is_in_inference_mode_by_itself_may_mask_its_scores() -> None:
    """Its calls are made before the mode is on."""

    class Decorated(ToyModel):
        @torch.inference_mode()
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden)

    model = Decorated(ToyRouter(select=in_groups, masks=True))
    with npu_replay.record(model) as recording:
        forwards(model, *range(5))
    with npu_replay.replay(model, recording.routes):
        forwards(model, *range(5))


def as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


@pytest.mark.parametrize("kind", ["record", "pin_recompute"])
def test_hooks_that_offload_are_no_checkpoint_whatever_their_module_is_called(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's lie in activation_checkpointing.offload_activations, and live longer than a graph."""
    monkeypatch.setattr(as_it_is, "__module__", "activation_checkpointing.offload_activations")
    model = ToyModel()
    with opened(kind, model, 5):
        for number in range(5):
            with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is):
                output = model(tokens(number).requires_grad_())
            output.sum().backward()


class OfMore(ToyModel):
    """Calls its router with more, as Megatron's layers with a padding_mask."""

    def forward(self, hidden: torch.Tensor, more: int) -> Any:
        return self.layers[0].router(hidden, more)[0]


def test_more_arguments_of_a_router_reach_it_in_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    original = ToyRouter.forward

    def forward(self: ToyRouter, hidden: torch.Tensor, *more: int) -> Any:
        received.extend(more)
        return original(self, hidden)

    monkeypatch.setattr(ToyRouter, "forward", forward)
    model = OfMore(ToyRouter())
    with npu_replay.record(model):
        for number in range(7):
            model(tokens(number), number)
    assert received == [*range(7)]
