"""What a router does to its scores before its top-k: what is taken for a mask, and what isn't.

The truth is the router's own code over the scores that it got, or an untouched run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import npu_replay
from npu_replay import NoEffect, RoutedExperts
from zoo.toys import (
    EXPERTS,
    ROWS,
    TOPK,
    ToyModel,
    ToyRouter,
    forwards,
    in_groups,
    opened,
    outside_groups,
    run,
    same,
    tokens,
)

Scores = torch.Tensor
Pair = Any
Select = Callable[[ToyRouter, Scores], Pair]

PADDING = torch.arange(ROWS) % 3 == 1
GROUPS = torch.arange(EXPERTS) // (EXPERTS // 4)
RECOMPUTE = pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])

pytestmark = pytest.mark.usefixtures("toy_routers")


def after(change: Callable[[Scores, torch.Tensor], Scores]) -> Select:
    """A top-k of what `change` makes of the scores and of the mask of groups."""
    return lambda router, scores: change(scores, outside_groups(scores)).topk(router.topk)


def written(into: Scores, places: Any, values: Any) -> Scores:
    into[places] = values
    return into


def foreign() -> RoutedExperts:
    """Two neighbours of the experts: often in groups that are masked."""
    first = torch.arange(ROWS) * 5 % (EXPERTS - TOPK + 1)
    ids = first[:, None, None] + torch.arange(TOPK)
    return RoutedExperts(ids=ids, layers=range(1), num_experts=EXPERTS)


def of_its_own_record(model: nn.Module, count: int) -> list[RoutedExperts]:
    """What is recorded; neither that nor its replay changes anything."""
    untouched = run(model, *range(count))
    with npu_replay.record(model) as recording:
        assert same(run(model, *range(count)), untouched)
    with npu_replay.replay(model, recording.routes):
        assert same(run(model, *range(count)), untouched)
    return recording.routes


def replayed(select: Select, count: int = 4, **about: Any) -> list[tuple[Scores, Scores, torch.Tensor]]:
    """Of each micro-batch of foreign routes, the scores and what the router goes on with: values and ids."""
    found: list[tuple[Scores, Scores, torch.Tensor]] = []

    def reads(router: ToyRouter, scores: Scores) -> Pair:
        values, ids = select(router, scores)
        found.append((scores, values, ids))
        return values, ids

    model = ToyModel(ToyRouter(select=reads, masks=True, **about))
    with npu_replay.replay(model, [foreign()] * count):
        forwards(model, *range(count))
    assert len(found) == count
    assert all(torch.equal(ids, foreign().layer_ids(0).long()) for _, _, ids in found)
    return found


def padding_behind_groups(scores: Scores, out: torch.Tensor) -> Scores:
    return scores.masked_fill(out, 0.0).masked_fill(PADDING[:, None], 0.0)


def scaled_behind_the_mask(scores: Scores, out: torch.Tensor) -> Scores:
    """The scores before the mask aren't what they were when the top-k comes."""
    before = scores * 1.0
    masked = before.masked_fill(out, 0.0)
    before.mul_(2.5)
    return masked


def groups_behind_a_bias(router: ToyRouter, scores: Scores) -> Pair:
    return in_groups(router, scores + torch.linspace(-0.01, 0.01, EXPERTS))


OWN: dict[str, Select] = {
    "padding is filled": after(lambda scores, out: scores.masked_fill(PADDING[:, None], 0.0)),
    "padding behind groups": after(padding_behind_groups),
    "below a threshold": after(lambda scores, out: scores.masked_fill(scores < 0.3, 0.0)),
    "groups behind a bias": groups_behind_a_bias,
    "scaled in place": after(lambda scores, out: scores.masked_fill(out, 0.0).mul_(2.5)),
    "before is scaled in place": after(scaled_behind_the_mask),
}


@pytest.mark.parametrize("how", OWN)
def test_a_replay_of_its_own_record_changes_nothing(how: str) -> None:
    of_its_own_record(ToyModel(*(ToyRouter(select=OWN[how], masks=True) for _ in range(2))), 4)


def of_a_view(scores: Scores, out: torch.Tensor) -> Scores:
    """As torchtitan's router masks: a view [rows, groups, experts of a group], by a mask of groups."""
    parts, outside = (one.unflatten(1, (4, -1)) for one in (scores, out))
    return parts.masked_fill(outside[..., :1], float("-inf")).flatten(1)


def after_another_mask(router: ToyRouter, scores: Scores) -> Pair:
    (scores * 2).masked_fill(outside_groups(scores), 0.0)  # another tensor's
    return torch.topk(scores, router.topk)


UNDONE: dict[str, Select] = {
    "masked_fill": in_groups,
    "masked_fill_": after(lambda scores, out: scores.clone().masked_fill_(out, float("-inf"))),
    "torch.masked_fill": after(lambda scores, out: torch.masked_fill(scores, mask=out, value=-1e4)),
    "two masks": after(lambda scores, out: scores.masked_fill(out, 0.0).masked_fill(GROUPS == 3, 0.0)),
    "of a view": after(of_a_view),
    "another tensor's": after_another_mask,
}


def unseen(scores: Scores, out: torch.Tensor) -> Scores:
    with torch._C.DisableTorchFunction():  # as in a compiled function
        return scores * ~out


def through_a_softmax(scores: Scores, out: torch.Tensor) -> Scores:
    return scores.log().masked_fill(out, float("-inf")).softmax(dim=1)


REFUSED: dict[str, Select] = {
    "through a softmax": after(through_a_softmax),
    "where": after(lambda scores, out: scores.where(~out, torch.tensor(0.0))),
    "product": after(lambda scores, out: scores * ~out),
    "product that nothing sees": after(unseen),
    "sum": after(lambda scores, out: out.float() * -1e4 + scores),
    "assigned": after(lambda scores, out: written(scores.clone(), out, 0.0)),
    "scaled in place": after(lambda scores, out: scores.masked_fill(out, 0.0).mul_(2.5)),
}


@pytest.mark.parametrize("how", UNDONE)
def test_a_mask_by_masked_fill_is_undone(how: str) -> None:
    of_its_own_record(ToyModel(ToyRouter(select=UNDONE[how], masks=True)), 4)
    for scores, values, ids in replayed(UNDONE[how]):
        assert torch.equal(values, scores.gather(1, ids))
        (slope,) = torch.autograd.grad(values.sum(), scores)
        assert torch.equal(slope.nonzero()[:, 1].view_as(ids), ids.sort().values)


@pytest.mark.parametrize("how", REFUSED)
def test_a_mask_by_another_function_is_refused_where_it_rules_out_an_expert(how: str) -> None:
    of_its_own_record(ToyModel(ToyRouter(select=REFUSED[how], masks=True)), 4)
    with pytest.raises(
        NoEffect, match=r"(?s)micro-batch 0.*made from a mask's number.*masks=False.*masked_fill"
    ):
        replayed(REFUSED[how])


def test_a_router_that_is_described_without_masks_is_let_be() -> None:
    model = ToyModel(ToyRouter(select=after(through_a_softmax), masks=False))
    with npu_replay.replay(model, [foreign()] * 6):
        run(model, *range(6))


# What is no mask

BIAS = torch.linspace(-0.3, 0.3, EXPERTS) * (torch.arange(EXPERTS) % 2)
LOWERING = torch.where(GROUPS == 3, -0.1, 0.0)
SELDOM = torch.where(GROUPS == 3, 1e-3, 1.0)


@pytest.mark.parametrize("leaves", [0, EXPERTS // 2])
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda scores, out: scores + BIAS, lambda scores: scores + BIAS),
        (padding_behind_groups, lambda scores: scores.masked_fill(PADDING[:, None], 0.0)),
        (lambda scores, out: scores * SELDOM + LOWERING, lambda scores: scores * SELDOM + LOWERING),
    ],
    ids=["bias", "padding keeps its fill", "bias that lowers a group"],
)
def test_weights_are_those_of_the_steps_that_mask_nothing(change: Any, wanted: Any, leaves: int) -> None:
    for scores, values, ids in replayed(after(change), leaves=leaves):
        assert torch.equal(values, wanted(scores).gather(1, ids))


@pytest.mark.parametrize("masks", [False, True])
def test_an_expert_of_probability_zero_is_replayed_where_the_own_choice_has_one_too(masks: bool) -> None:
    model = ToyModel(ToyRouter(masks=masks))
    with torch.no_grad():
        model.layers[0].router.weight.mul_(1e4)  # a softmax that is 0 or 1
    with npu_replay.replay(model, [foreign()]):
        model(tokens())


@RECOMPUTE
def test_a_mask_may_cover_nothing_in_some_micro_batches(recompute: str | None) -> None:
    """All forwards come before one backward: each recompute saves what its own forward saved."""

    def change(scores: Scores, _: torch.Tensor) -> Scores:
        out = torch.zeros_like(scores, dtype=torch.bool)
        out[:, 12:] = int(scores.detach().sum(0).argmax()) % 2 == 0
        return scores.masked_fill(out, 0.0)

    model = ToyModel(*(ToyRouter(select=after(change), masks=True) for _ in range(2)), recompute=recompute)
    of_its_own_record(model, 8)


def padding_ruled_out(router: ToyRouter, scores: Scores) -> Pair:
    values, ids = scores.log().masked_fill(PADDING[:, None], float("-inf")).topk(router.topk)
    return values.sigmoid(), ids


def fewer_than_are_asked_for(router: ToyRouter, scores: Scores) -> Pair:
    best = scores.sort(dim=1, descending=True).values[:, 1:2]
    values, ids = scores.masked_fill(scores < best, float("-inf")).topk(router.topk)
    return values.softmax(dim=1), ids


@pytest.mark.parametrize("select", [padding_ruled_out, fewer_than_are_asked_for])
@pytest.mark.parametrize("masks", [False, True])
def test_what_the_router_itself_chooses_may_be_ruled_out(select: Select, masks: bool) -> None:
    model = ToyModel(*(ToyRouter(select=select, masks=masks) for _ in range(2)))
    with npu_replay.record(model) as recording:
        outputs = [model(tokens(number)) for number in range(4)]
    with npu_replay.replay(model, recording.routes):
        assert all(torch.equal(model(tokens(number)), output) for number, output in enumerate(outputs))


# What somebody else does around a router


def least(scores: Scores) -> Pair:
    """The experts that a top-k wouldn't choose."""
    ids = scores.argsort(dim=1)[:, :TOPK]
    return torch.return_types.topk((scores.gather(1, ids), ids))


class ByFunction(torch.overrides.TorchFunctionMode):
    """Torch has it off in backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_topk = getattr(func, "__name__", "") == "topk"
        return least(args[0]) if is_topk else func(*args, **(kwargs or {}))


class ByDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return least(args[0]) if func is torch.ops.aten.topk.default else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [ByFunction, ByDispatch])
@RECOMPUTE
@pytest.mark.parametrize("block", ["record", "pin_recompute"])
def test_a_mode_of_somebodys_that_answers_the_top_k_is_heard(
    mode: Any, recompute: str | None, block: str
) -> None:
    untouched = run(ToyModel(ToyRouter(select=lambda _, scores: least(scores))), *range(4))
    model = ToyModel(ToyRouter(), recompute=recompute)
    with mode(), opened(block, model):
        assert same(run(model, *range(4)), untouched)


@pytest.mark.parametrize(("number", "hung"), [(0, 0), (3, 0), (3, 3)])
@pytest.mark.parametrize("block", ["record", "replay"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["", "a global hook"])
def test_a_hook_of_somebodys_that_returns_other_experts_is_refused(
    everywhere: bool, number: int, hung: int, block: str
) -> None:
    """It is hung up inside the block, before micro-batch `hung`, and lies in micro-batch `number`."""
    model = ToyModel()
    router = model.layers[1].router

    def moves(module: nn.Module, args: Any, output: Pair) -> Pair:
        lies = micro_batch == number and module is router
        return (output[0], (output[1] + 1) % EXPERTS) if lies else None

    hang = nn.modules.module.register_module_forward_hook if everywhere else router.register_forward_hook
    with (
        contextlib.ExitStack() as undo,
        pytest.raises(NoEffect, match=rf"micro-batch {number}"),
        opened(block, model, 4),
    ):
        for micro_batch in range(4):
            if micro_batch == hung:
                undo.callback(hang(moves).remove)
            model(tokens(micro_batch))


def test_a_hook_that_returns_the_same_experts_is_let_be() -> None:
    model = ToyModel(recompute="non-reentrant")
    for layer in model.layers:
        layer.router.register_forward_hook(lambda module, args, output: (output[0] * 1, output[1].clone()))
    of_its_own_record(model, 3)
