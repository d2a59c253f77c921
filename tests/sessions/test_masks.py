"""What a router does to its scores before its top-k: what is taken for a mask, and what isn't.

The truth is the router's own code over the scores that a hook has seen, or an untouched run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import NoEffect, RoutedExperts, RouterError
from toys import EXPERTS, ROWS, TOPK, ToyModel, ToyRouter, in_groups, outside_groups, run, same, tokens

Scores = torch.Tensor
Pair = Any
Select = Callable[[ToyRouter, Scores], Pair]

PADDING = torch.arange(ROWS) % 3 == 1
GROUPS = torch.arange(EXPERTS) // (EXPERTS // 4)


pytestmark = pytest.mark.usefixtures("toy_routers")


def padding_filled(router: ToyRouter, scores: Scores) -> Pair:
    return scores.masked_fill(PADDING[:, None], 0.0).topk(router.topk)


def padding_assigned(router: ToyRouter, scores: Scores) -> Pair:
    scores = scores.clone()
    scores[PADDING] = 0.0
    return scores.topk(router.topk)


def padding_behind_groups(router: ToyRouter, scores: Scores) -> Pair:
    return (
        scores.masked_fill(outside_groups(scores), 0.0).masked_fill(PADDING[:, None], 0.0).topk(router.topk)
    )


def above_a_threshold(router: ToyRouter, scores: Scores) -> Pair:
    return scores.masked_fill(scores < 0.3, 0.0).topk(router.topk)


def capped(router: ToyRouter, scores: Scores) -> Pair:
    return torch.where(scores > 0.5, 0.5, scores).topk(router.topk)


def lowered(router: ToyRouter, scores: Scores) -> Pair:
    return torch.topk(scores - 0.05 * (GROUPS > 1), router.topk)


def groups_behind_a_bias(router: ToyRouter, scores: Scores) -> Pair:
    biased = scores + torch.linspace(-0.01, 0.01, EXPERTS)
    return biased.masked_fill(outside_groups(biased), float("-inf")).topk(router.topk)


@pytest.mark.parametrize(
    "select",
    [
        *(padding_filled, padding_assigned, padding_behind_groups, above_a_threshold),
        *(capped, lowered, groups_behind_a_bias),
    ],
)
def test_a_replay_of_its_own_record_changes_nothing(select: Select) -> None:
    model = ToyModel(*(ToyRouter(select=select, masks=True) for _ in range(2)))
    untouched = run(model, 0, 1, 2, 3)
    with npu_replay.record(model) as recording:
        assert same(run(model, 0, 1, 2, 3), untouched)
    with npu_replay.replay(model, recording.routes):
        assert same(run(model, 0, 1, 2, 3), untouched)


def copied_into_zeros(router: ToyRouter, scores: Scores) -> Pair:
    masked = torch.zeros_like(scores)
    allowed = ~outside_groups(scores)
    masked[allowed] = scores[allowed]
    return masked.topk(router.topk)


def scattered(router: ToyRouter, scores: Scores) -> Pair:
    places = outside_groups(scores).to(torch.uint8).argsort(dim=1, stable=True)[:, : EXPERTS // 2]
    return torch.zeros_like(scores).scatter(1, places, scores.gather(1, places)).topk(router.topk)


def copied_over(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.detach().clone()  # as memory that was never written may be
    masked.copy_(scores.masked_fill(outside_groups(scores), -1.0))
    return masked.topk(router.topk)


def the_least_of_two_near_ones(router: ToyRouter, scores: Scores) -> Pair:
    return torch.minimum(scores, torch.where(outside_groups(scores), -1.0, 1.0)).topk(router.topk)


def in_chunks(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.masked_fill(outside_groups(scores), 0.0)
    return torch.cat(masked.chunk(2, dim=1), dim=1).topk(router.topk)


def of_another_type(router: ToyRouter, scores: Scores) -> Pair:
    return scores.masked_fill(outside_groups(scores), 0.0).type(torch.float64).float().topk(router.topk)


def where_with_a_tensor(router: ToyRouter, scores: Scores) -> Pair:
    return scores.where(~outside_groups(scores), torch.tensor(0.0)).topk(router.topk)


def masked_twice(router: ToyRouter, scores: Scores) -> Pair:
    last = torch.zeros(len(scores), EXPERTS, dtype=torch.bool)
    last[:, -1] = True
    return scores.masked_fill(outside_groups(scores), 0.0).masked_fill(last, 0.0).topk(router.topk)


def after_another_mask(router: ToyRouter, scores: Scores) -> Pair:
    (scores * 2).masked_fill(outside_groups(scores), 0.0)  # padding, say: another tensor's mask
    return torch.topk(scores, router.topk)


def filled_in_place(router: ToyRouter, scores: Scores) -> Pair:
    return scores.clone().masked_fill_(outside_groups(scores), float("-inf")).topk(router.topk)


def assigned(number: float) -> Select:
    def select(router: ToyRouter, scores: Scores) -> Pair:
        masked = scores.clone()
        masked[outside_groups(scores)] = number
        return masked.topk(router.topk)

    return select


def multiplied(router: ToyRouter, scores: Scores) -> Pair:
    return (scores * ~outside_groups(scores)).topk(router.topk)


def multiplied_in_place(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.clone()
    masked *= (~outside_groups(scores)).float()
    return torch.topk(masked, router.topk)


def added(router: ToyRouter, scores: Scores) -> Pair:
    return torch.topk(outside_groups(scores).float() * -1e4 + scores, router.topk)


def subtracted_in_place(router: ToyRouter, scores: Scores) -> Pair:
    return scores.clone().sub_(outside_groups(scores) * 1e4).topk(router.topk)


def through_a_view(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.clone()
    kept = ~outside_groups(scores)
    for column in range(EXPERTS):
        masked[:, column].mul_(kept[:, column])
    return masked.topk(router.topk)


@pytest.mark.parametrize(
    "select",
    [
        *(in_groups, where_with_a_tensor, masked_twice, after_another_mask, filled_in_place),
        *(assigned(-1.0), assigned(1e-9), multiplied, multiplied_in_place, added, subtracted_in_place),
        *(through_a_view, copied_into_zeros, scattered, copied_over, the_least_of_two_near_ones),
        *(in_chunks, of_another_type),
    ],
)
def test_a_mask_is_seen_by_whatever_function_it_is_made(select: Select) -> None:
    seen: list[Scores] = []

    def reads(router: ToyRouter, scores: Scores) -> Pair:
        seen.append(scores)
        return select(router, scores)

    model = ToyModel(ToyRouter(select=reads, masks=True))
    untouched = run(model, 0, 1, 2, 3)
    with npu_replay.record(model) as recording:
        assert same(run(model, 0, 1, 2, 3), untouched)
    with npu_replay.replay(model, recording.routes):
        assert same(run(model, 0, 1, 2, 3), untouched)
    seen.clear()
    for scores, (values, ids) in zip(seen, given(model, foreign()), strict=True):
        assert torch.equal(values, scores.gather(1, ids))
        (slope,) = torch.autograd.grad(values.sum(), scores, allow_unused=True)
        assert slope is not None
        assert torch.equal(slope.nonzero()[:, 1].view_as(ids), ids.sort().values)


def test_a_product_with_zeros_that_nothing_sees_is_refused() -> None:
    def hidden(router: ToyRouter, scores: Scores) -> Pair:
        with torch._C.DisableTorchFunction():  # as in a compiled function
            masked = scores * ~outside_groups(scores)
        return masked.topk(router.topk)

    with pytest.raises(NoEffect, match="made from a mask's number"):
        given(ToyModel(ToyRouter(select=hidden, masks=True)), foreign())


def given(model: nn.Module, routes: RoutedExperts, count: int = 4) -> list[Pair]:
    outputs: list[Pair] = []
    handle = model.layers[0].router.register_forward_hook(lambda *about: outputs.append(about[2]))
    with npu_replay.replay(model, [routes] * count):
        for number in range(count):
            model(tokens(number))
    handle.remove()
    return outputs


def foreign() -> RoutedExperts:
    """Two neighbours of the experts: often in groups that are masked."""
    first = torch.arange(ROWS) * 5 % (EXPERTS - TOPK + 1)
    ids = first[:, None, None] + torch.arange(TOPK)
    return RoutedExperts(ids=ids, layers=range(1), num_experts=EXPERTS)


def test_a_bias_without_gradient_that_lowers_experts_nobody_chose_is_no_mask() -> None:
    bias, seldom = torch.where(GROUPS == 3, -0.1, 0.0), torch.where(GROUPS == 3, 1e-3, 1.0)
    seen: list[tuple[Scores, Pair]] = []

    def select(router: ToyRouter, scores: Scores) -> Pair:
        biased = scores * seldom + bias
        seen.append((biased, found := torch.topk(biased, router.topk)))
        return found

    given(ToyModel(ToyRouter(select=select, masks=True)), foreign())
    for biased, (values, ids) in seen:
        assert torch.equal(values, biased.gather(1, ids))


def test_padding_keeps_its_fill_and_other_rows_lose_their_mask() -> None:
    seen: list[Scores] = []

    def select(router: ToyRouter, scores: Scores) -> Pair:
        seen.append(scores)
        return padding_behind_groups(router, scores)

    for scores, (values, ids) in zip(
        seen, given(ToyModel(ToyRouter(select=select, masks=True)), foreign()), strict=True
    ):
        wanted = scores.gather(1, ids).masked_fill(PADDING[:, None], 0.0)
        assert torch.equal(values, wanted)


BIAS = torch.linspace(-0.3, 0.3, EXPERTS) * (torch.arange(EXPERTS) % 2)


def biased(router: ToyRouter, scores: Scores) -> Pair:
    """By a bias that is zero for half of the experts."""
    return torch.topk(scores + BIAS, router.topk)


def scaled(router: ToyRouter, scores: Scores) -> Pair:
    return torch.topk(scores * 2.5, router.topk)


def by_groups(router: ToyRouter, scores: Scores) -> Pair:
    """In the shape of groups, and cast afterwards."""
    masked = scores.view(len(scores), 4, -1).half().clone()
    masked[outside_groups(scores).view_as(masked)] = 1e-4
    return masked.flatten(1).float().topk(router.topk)


@pytest.mark.parametrize(
    ("select", "wanted"),
    [
        (biased, lambda scores: scores + BIAS),
        (scaled, lambda scores: scores * 2.5),
        (by_groups, lambda scores: scores.half().float()),
    ],
)
def test_weights_are_those_of_the_steps_that_mask_nothing(
    select: Select, wanted: Callable[[Scores], Scores]
) -> None:
    taken: list[tuple[Scores, Scores]] = []

    def reads(router: ToyRouter, scores: Scores) -> Pair:
        chosen = select(router, scores)
        taken.append((scores, chosen[0]))
        return chosen

    model, routes = ToyModel(ToyRouter(select=reads, masks=True)), foreign()
    with npu_replay.replay(model, [routes] * 3):
        model(tokens(0)), model(tokens(1)), model(tokens(2))
    for scores, values in taken:
        assert torch.equal(values, wanted(scores).gather(1, routes.layer_ids(0).long()))


def test_a_bias_that_is_zero_at_first_is_no_mask_later() -> None:
    """An optimizer that steps inside the block, and micro-batches that aren't checked."""
    bias = torch.zeros(EXPERTS)
    taken: list[tuple[Scores, Scores]] = []

    def select(router: ToyRouter, scores: Scores) -> Pair:
        chosen = torch.topk(scores + bias, router.topk)
        taken.append((scores + bias, chosen[0]))
        return chosen

    model, routes = ToyModel(ToyRouter(select=select, masks=True)), foreign()
    with npu_replay.replay(model, [routes] * 8):
        for number in range(8):
            bias += BIAS if number == 5 else 0
            model(tokens(number))
    for scores, values in taken:
        assert torch.equal(values, scores.gather(1, routes.layer_ids(0).long()))


def test_a_bias_that_is_zero_yet_learns_in_a_replay() -> None:
    router = ToyRouter(select=lambda me, scores: torch.topk((scores + me.bias) * 1.0, me.topk), masks=True)
    router.bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    model = ToyModel(router)
    with torch.no_grad():
        router.bias.zero_()
    model(tokens()).square().mean().backward()
    live = router.bias.grad
    model.zero_grad()
    with npu_replay.record(model) as recording:
        model(tokens())
    with npu_replay.replay(model, recording.routes):
        model(tokens()).square().mean().backward()
    assert live is not None
    assert torch.equal(router.bias.grad, live)


def test_a_bias_that_learns_is_no_mask_where_it_lowers_experts_that_nobody_chose() -> None:
    router = ToyRouter(select=lambda me, scores: torch.topk(scores + me.bias, me.topk), masks=True)
    router.bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    model = ToyModel(router)
    taken: list[Scores] = []
    router.register_forward_hook(lambda _, __, output: taken.append(output[0]))
    with torch.no_grad():
        router.bias.copy_(torch.where(torch.arange(EXPERTS) < EXPERTS // 2, 0.0, -5.0))
    lowered = torch.arange(EXPERTS // 2, EXPERTS // 2 + TOPK)
    routes = RoutedExperts(ids=lowered.expand(ROWS, 1, TOPK), layers=range(1), num_experts=EXPERTS)
    with npu_replay.replay(model, [routes]):
        model(tokens()).square().mean().backward()
    assert bool((taken[0] < -4).all())
    assert router.bias.grad is not None
    assert bool(router.bias.grad[lowered].all())


def into_a_buffer(router: ToyRouter, scores: Scores) -> Pair:
    masked = torch.empty_like(scores.detach())
    return torch.topk(torch.mul(scores.detach(), ~outside_groups(scores), out=masked), router.topk)


def test_a_mask_that_is_written_into_a_buffer_is_seen() -> None:
    taken: list[tuple[Scores, Scores]] = []

    def reads(router: ToyRouter, scores: Scores) -> Pair:
        chosen = into_a_buffer(router, scores)
        taken.append((scores.detach(), chosen[0]))
        return chosen

    model, routes = ToyModel(ToyRouter(select=reads, masks=True)), foreign()
    with torch.no_grad(), npu_replay.replay(model, [routes]):
        model(tokens())
    assert torch.equal(taken[0][1], taken[0][0].gather(1, routes.layer_ids(0).long()))


@pytest.mark.parametrize("masks", [False, True])
def test_a_mask_of_a_router_that_is_described_without_one_is_named(masks: bool) -> None:
    model = ToyModel(ToyRouter(select=in_groups, masks=masks))
    refused = (
        contextlib.nullcontext() if masks else pytest.raises(NoEffect, match="a mask that can't be seen")
    )
    with refused, npu_replay.replay(model, [foreign()]):
        model(tokens())


@pytest.mark.parametrize("masks", [False, True])
def test_a_replayed_expert_of_probability_zero_is_not_taken_for_a_mask(masks: bool) -> None:
    model = ToyModel(ToyRouter(masks=masks))
    with torch.no_grad():
        model.layers[0].router.weight.mul_(1e4)  # a softmax that is 0 or 1
    with npu_replay.replay(model, [foreign()]):
        model(tokens())


def softmax_of_the_rest(router: ToyRouter, scores: Scores) -> Pair:
    logits = scores.log()
    return logits.masked_fill(outside_groups(logits), float("-inf")).softmax(dim=1).topk(router.topk)


def softmax_of_a_sum(router: ToyRouter, scores: Scores) -> Pair:
    logits = scores.log()
    return (logits + outside_groups(logits) * -1e4).softmax(dim=1).topk(router.topk)


def biased_after_a_mask(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.masked_fill(outside_groups(scores), 0.0)
    return (masked + torch.linspace(-0.01, 0.01, EXPERTS)).topk(router.topk)


@pytest.mark.parametrize("select", [softmax_of_the_rest, softmax_of_a_sum, biased_after_a_mask])
@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_mask_whose_scores_go_through_another_function_is_refused(select: Select, number: int) -> None:
    """In the micro-batch where a masked expert is given, checked or not; and its own record is right."""
    model = ToyModel(ToyRouter(select=select, masks=True))
    untouched = run(model, *range(6))
    with npu_replay.record(model) as recording:
        assert same(run(model, *range(6)), untouched)
    with npu_replay.replay(model, recording.routes):
        assert same(run(model, *range(6)), untouched)
    routes = [*recording.routes]
    routes[number] = foreign()
    with (
        pytest.raises(NoEffect, match=rf"(?s)micro-batch {number}.*masks=False"),
        npu_replay.replay(model, routes),
    ):
        run(model, *range(6))


def test_a_sharp_softmax_without_a_mask_is_replayed() -> None:
    """Its probabilities are zeros, and rightly so."""
    model = ToyModel(ToyRouter(select=lambda me, s: (s.log() * 400).softmax(dim=1).topk(me.topk), masks=True))
    assert any(bool((values == 0).any()) for values, _ in given(model, foreign()))


def test_of_two_tensors_with_the_same_scores_the_one_with_a_gradient_is_meant() -> None:
    def select(router: ToyRouter, scores: Scores) -> Pair:
        twins = torch.where(scores > 0.1, scores.detach(), scores) * 1.0
        both = torch.where(twins > 9, scores.detach(), scores)
        return both.masked_fill(outside_groups(scores), 0.0).topk(router.topk)

    model = ToyModel(ToyRouter(select=select, masks=True))
    untouched = run(model, 0, 1)
    with npu_replay.record(model) as recording:
        run(model, 0, 1)
    with npu_replay.replay(model, recording.routes):
        assert same(run(model, 0, 1), untouched)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_ids_and_weights_may_be_asked_for_by_two_top_ks_of_the_same_scores(
    masks: bool, recompute: str | None
) -> None:
    """Both give what the routes say; a top-k of other scores is the router's own."""
    others: list[torch.Tensor] = []
    seen: list[tuple[Scores, torch.Tensor, torch.Tensor]] = []

    def select(router: ToyRouter, scores: Scores) -> Pair:
        ids = torch.topk(scores, router.topk).indices
        others.append(torch.topk(scores.detach() * 1.0, router.topk).indices)
        values = scores.topk(router.topk, dim=-1).values
        seen.append((scores, values, ids))
        return values, ids

    model = ToyModel(ToyRouter(select=select, masks=masks), recompute=recompute)
    routes = foreign()
    with npu_replay.replay(model, [routes] * 4):
        run(model, 0, 1, 2, 3)
    assert len(seen) == (8 if recompute else 4)
    for scores, values, ids in seen:
        assert torch.equal(ids, routes.layer_ids(0).long())
        assert torch.equal(values, scores.gather(1, ids))
    assert not any(torch.equal(one, routes.layer_ids(0).long()) for one in others)


@pytest.mark.parametrize("of", [torch.Tensor.detach, lambda scores: scores.view(-1, EXPERTS)])
@pytest.mark.parametrize("number", [0, 3])
def test_a_view_of_the_scores_has_the_same_answer(of: Callable[[Scores], Scores], number: int) -> None:
    def select(router: ToyRouter, scores: Scores) -> Pair:
        ids = torch.topk(of(scores), router.topk).indices
        values = scores.topk(router.topk).values
        seen.append((scores, values, ids))
        return values, ids

    seen: list[tuple[Scores, torch.Tensor, torch.Tensor]] = []
    model = ToyModel(ToyRouter(select=select))
    with npu_replay.record(model) as recording:
        run(model, *range(5))
    routes = [*recording.routes]
    routes[number] = foreign()
    seen.clear()
    with npu_replay.replay(model, routes):
        run(model, *range(5))
    scores, values, ids = seen[number]
    assert torch.equal(ids, foreign().layer_ids(0).long())
    assert torch.equal(values, scores.gather(1, ids))
    assert values.requires_grad


@pytest.mark.choice
@pytest.mark.parametrize("kind", ["product", "sum", "where", "minimum"])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_a_mask_may_cover_nothing_in_some_micro_batches(kind: str, recompute: str | None) -> None:
    """All forwards come before one backward: each recompute saves what its own forward saved."""

    def select(router: ToyRouter, scores: Scores) -> Pair:
        out = torch.zeros_like(scores, dtype=torch.bool)
        out[:, 12:] = int(scores.detach().sum(0).argmax()) % 2 == 0
        made = {
            "product": lambda: scores * (~out).float(),
            "sum": lambda: scores + out * -1e9,
            "where": lambda: torch.where(out, torch.zeros_like(scores), scores),
            "minimum": lambda: torch.minimum(scores, torch.where(out, -1.0, 10.0)),
        }
        return made[kind]().topk(router.topk)

    model = ToyModel(*(ToyRouter(select=select, masks=True) for _ in range(2)), recompute=recompute)
    untouched = run(model, *range(8))
    with npu_replay.record(model) as recording:
        assert same(run(model, *range(8)), untouched)
    with npu_replay.replay(model, recording.routes):
        assert same(run(model, *range(8)), untouched)


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


class LastExperts(torch.overrides.TorchFunctionMode):
    """Answers every top-k over the experts by the last of them. Torch has it off in backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "topk" or args[0].shape[-1] != EXPERTS:
            return func(*args, **(kwargs or {}))
        ids = torch.arange(EXPERTS - TOPK, EXPERTS).expand(len(args[0]), TOPK).clone()
        return torch.return_types.topk((args[0].gather(1, ids), ids))


class FirstExperts(torch.utils._python_dispatch.TorchDispatchMode):
    """Answers every top-k over the experts by the first of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default or args[0].shape[-1] != EXPERTS:
            return func(*args, **(kwargs or {}))
        ids = torch.arange(TOPK).expand(len(args[0]), TOPK).clone()
        return args[0].gather(1, ids), ids


@pytest.mark.choice
@pytest.mark.parametrize("mode", [LastExperts, FirstExperts])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("block", [npu_replay.record, npu_replay.pin_recompute])
def test_a_mode_of_somebodys_that_answers_the_top_k_is_heard(
    mode: Any, masks: bool, recompute: str | None, block: Any
) -> None:
    wanted = torch.arange(TOPK) + (EXPERTS - TOPK if mode is LastExperts else 0)

    def answered(router: ToyRouter, scores: Scores) -> Pair:
        ids = wanted.expand(len(scores), TOPK)
        return scores.gather(1, ids), ids

    untouched = run(ToyModel(ToyRouter(select=answered)), 0, 1, 2, 3)
    model = ToyModel(ToyRouter(masks=masks), recompute=recompute)
    with mode(), block(model) as session:
        assert same(run(model, 0, 1, 2, 3), untouched)
    if block is npu_replay.record:
        assert all(torch.equal(one.layer_ids(0).long(), wanted.expand(ROWS, TOPK)) for one in session.routes)


def test_ids_of_several_routers_in_one_buffer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, native = torch.empty(ROWS, TOPK, dtype=torch.int64), torch.topk

    def static(*args: Any, **kwargs: Any) -> Any:
        values, ids = native(*args, **kwargs)
        calls.append(1)
        if len(calls) <= 6:
            return torch.return_types.topk((values, ids))
        buffer.data.copy_(ids)
        return torch.return_types.topk((values, buffer))

    calls: list[int] = []
    monkeypatch.setattr(torch, "topk", static)
    model = ToyModel()
    with pytest.raises(RouterError, match=r"micro-batch 3.*in one buffer"), npu_replay.record(model):
        model(tokens(0)), model(tokens(1)), model(tokens(2)), model(tokens(3))


@pytest.mark.choice
@pytest.mark.parametrize("when", ["before", "inside", "inside, twice"])
@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("block", ["record", "replay"])
def test_a_hook_of_somebodys_that_returns_other_experts_is_refused(
    when: str, number: int, block: str
) -> None:
    model = ToyModel()
    router, calls = model.layers[1].router, []

    def moves(module: nn.Module, args: Any, output: Pair) -> Pair:
        calls.append(1)
        return (output[0], (output[1] + 1) % EXPERTS) if len(calls) == number + 1 else None

    handles = [router.register_forward_hook(moves)] if when == "before" else []
    twin = ToyModel()
    with npu_replay.record(twin) as recording:
        run(twin, 0, 1, 2, 3)
    made = npu_replay.record(model) if block == "record" else npu_replay.replay(model, recording.routes)
    with pytest.raises(NoEffect, match=rf"micro-batch {number}"), made:
        if not handles:
            handles += [router.register_forward_hook(moves)]
        for one in range(4):
            if when == "inside, twice" and one == 1:
                handles += [router.register_forward_hook(lambda *_: None)]
            model(tokens(one))
    for handle in handles:
        handle.remove()
    assert not router._forward_hooks


def test_a_hook_that_returns_the_same_experts_is_let_be() -> None:
    model = ToyModel(recompute="non-reentrant")
    for layer in model.layers:
        layer.router.register_forward_hook(lambda module, args, output: (output[0] * 1, output[1].clone()))
    untouched = run(model, 0, 1, 2)
    with npu_replay.record(model) as recording:
        assert same(run(model, 0, 1, 2), untouched)
    with npu_replay.replay(model, recording.routes):
        assert same(run(model, 0, 1, 2), untouched)


@pytest.mark.parametrize("masks", [False, True])
def test_gradients_of_torch_func_go_through_a_replay(masks: bool) -> None:
    select = (lambda me, s: s.masked_fill(outside_groups(s), 0.0).topk(me.topk)) if masks else None
    model = ToyModel(ToyRouter(masks=masks, **({"select": select} if select else {})))
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, given, (tokens(),)).square().mean()

    untouched = torch.func.grad(loss)(parameters)
    with npu_replay.record(model) as recording:
        recorded = torch.func.grad(loss)(parameters)
    with npu_replay.replay(model, recording.routes):
        replayed = torch.func.grad(loss)(parameters)
    for name, wanted in untouched.items():
        assert torch.equal(recorded[name], wanted)
        assert torch.equal(replayed[name], wanted)


def test_a_retry_after_an_interrupt_does_not_get_the_errors_of_what_was_left() -> None:
    """The interrupted forward had a router that goes on with other experts."""
    model = ToyModel()
    model.wrong = True

    def changes(router: ToyRouter, scores: Scores) -> Pair:
        values, ids = torch.topk(scores, router.topk)
        return values, (ids + 1) % EXPERTS if model.wrong else ids

    def stops(router: ToyRouter, scores: Scores) -> Pair:
        if model.wrong:
            raise KeyboardInterrupt
        return torch.topk(scores, router.topk)

    model.layers[0].router.select, model.layers[1].router.select = changes, stops
    with npu_replay.record(model) as recording:
        for number in range(4):
            model.wrong = number == 3
            if model.wrong:
                with pytest.raises(KeyboardInterrupt):
                    model(tokens(number))
            model.wrong = False
            model(tokens(number))
    assert len(recording.routes) == 4


def test_a_checkpoint_with_a_mode_of_somebodys_counts_alike_in_both_passes() -> None:
    """The recompute of a record asks for the top-k that its forward asked for."""
    model, counted = ToyModel(ToyRouter()), []

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[-1] += func is torch.ops.aten.topk.default
            return func(*args, **(kwargs or {}))

    def watched(x: torch.Tensor) -> torch.Tensor:
        counted.append(0)
        with Counts():
            return model(x)

    with npu_replay.record(model):
        checkpoint(watched, tokens().requires_grad_(), use_reentrant=False).sum().backward()
    assert counted == [1, 1]
