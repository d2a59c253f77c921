"""The seam: which top-k is answered, how it is caught, and what its scores are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import topk as topk_taken_early
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.errors import RouterError
from zoo.outcome import in_thread
from zoo.toys import (
    EXPERTS,
    TOPK,
    Select,
    ToyModel,
    ToyRouter,
    foreign,
    outside_groups,
    run,
    same,
    tokens,
)

Scores = torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]


pytestmark = pytest.mark.usefixtures("toy_routers")


def check(select: Select, **about: Any) -> list[RoutedExperts]:
    """A router that selects so is recorded bit-equal and replayed; with live scores of the foreign ids."""
    model = ToyModel(ToyRouter(select=select, **about), ToyRouter(select=select, **about))
    untouched = run(model, 0, 1)
    for _ in range(2):  # the second time the safety net is off
        with npu_replay.record(model) as recording:
            assert same(run(model, 0, 1), untouched)
    outputs: list[Pair] = []
    scores: list[Scores] = []
    router = model.layers[0].router
    handle = router.register_forward_hook(lambda module, args, output: outputs.append(output))
    original = router.select
    router.select = lambda me, s: (scores.append(s), original(me, s))[1]
    routes = foreign(5)
    with npu_replay.replay(model, routes):
        for number in range(5):  # in micro-batch 3, which isn't checked, calls may be quick
            model(tokens(number))
    handle.remove()
    for given, (values, ids), live in zip(routes, outputs, scores, strict=True):
        assert torch.equal(ids, given.layer_ids(0).long())
        assert torch.equal(values, live.gather(1, ids)), "weights of replayed experts are their live scores"
        router.weight.grad = None
        values.sum().backward()
        assert float(router.weight.grad.abs().sum()) > 0
    return recording.routes


def as_function(router: ToyRouter, scores: Scores) -> Pair:
    return torch.topk(scores, router.topk)


def as_method(router: ToyRouter, scores: Scores) -> Pair:
    return scores.topk(k=router.topk, dim=1, sorted=False)


def by_keywords(router: ToyRouter, scores: Scores) -> Pair:
    return torch.topk(input=scores, k=router.topk, dim=-1)


def through_an_alias(router: ToyRouter, scores: Scores) -> Pair:
    return topk_taken_early(input=scores, k=router.topk)


def after_others(router: ToyRouter, scores: Scores) -> Pair:
    """S1: top-ks that look alike before the routing decision, and the aux loss's after it."""
    scores.view(len(scores), 1, EXPERTS).topk(router.topk)  # one group: three dimensions
    torch.topk(scores, router.topk, dim=0)
    torch.topk(scores, router.topk + 1)
    torch.topk(scores, router.topk, largest=False)
    torch.topk(scores[:-1], router.topk)
    torch.topk(scores[:, :-1], router.topk)
    torch.topk(x=scores.flip(1), k=router.topk)  # numpy's name for the scores
    torch.masked_fill(x=scores, mask=scores < 0, value=0.0)
    chosen = torch.topk(scores, router.topk)
    torch.topk(scores.flip(1), router.topk)
    return chosen


class Labelled(torch.Tensor):
    """A subclass of somebody's."""


def of_a_subclass(router: ToyRouter, scores: Scores) -> Pair:
    values, ids = torch.topk(scores.as_subclass(Labelled), router.topk)
    return values.as_subclass(torch.Tensor), ids.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    "select", [as_function, as_method, by_keywords, through_an_alias, after_others, of_a_subclass]
)
def test_the_routing_decision_is_found_however_it_is_called(select: Select) -> None:
    assert len(check(select)) == 2


def again_with_grad(router: ToyRouter, scores: Scores) -> Pair:
    """For a figure, and then to route."""
    with torch.no_grad():
        torch.topk(scores, router.topk)
    return torch.topk(scores, router.topk)


def again_after_a_write(router: ToyRouter, scores: Scores) -> Pair:
    torch.topk(scores, router.topk)[0].detach().zero_()
    return torch.topk(scores, router.topk)


def again_in_groups(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.masked_fill(outside_groups(scores), float("-inf"))
    torch.topk(masked.detach(), router.topk)
    return torch.topk(masked, router.topk)


def again_of_a_view(router: ToyRouter, scores: Scores) -> Pair:
    """The ids of one, and the values of the other."""
    ids = scores.detach().view(-1, EXPERTS).topk(router.topk).indices
    return scores.topk(router.topk).values, ids


@pytest.mark.parametrize("select", [again_with_grad, again_after_a_write, again_in_groups, again_of_a_view])
def test_a_top_k_of_the_same_scores_again_has_values_of_its_own(select: Select) -> None:
    check(select, masks=select is again_in_groups)


def test_a_top_k_over_tokens_is_not_taken_for_the_routing_again() -> None:
    """Where a micro-batch has as many tokens as experts."""
    figures: list[tuple[Scores, torch.Tensor]] = []

    def select(router: ToyRouter, scores: Scores) -> Pair:
        chosen = torch.topk(scores, router.topk)
        figures.append((scores.detach().t(), torch.topk(scores.t(), router.topk)[1]))
        return chosen

    ids = torch.arange(TOPK).expand(EXPERTS, 1, TOPK)
    with npu_replay.replay(
        ToyModel(ToyRouter(select=select)), [RoutedExperts(ids=ids, layers=[0], num_experts=EXPERTS)]
    ) as session:
        session.chunks[0](tokens(rows=EXPERTS))
    scores, found = figures[0]
    assert torch.equal(found, scores.topk(TOPK)[1])


@pytest.mark.parametrize("first", [False, True])
def test_what_one_mode_has_learned_decides_nothing_in_the_other(first: bool) -> None:
    """A router that calls torch.topk in one of them, and a name that was taken early in the other."""

    def select(router: ToyRouter, scores: Scores) -> Pair:
        return (as_function if router.training == first else through_an_alias)(router, scores)

    model = ToyModel(ToyRouter(select=select))
    with npu_replay.record(model) as recording:
        for number in range(4):
            model.train(first == (number < 2))(tokens(number))
    with npu_replay.replay(model, recording.routes):
        for number in range(4):
            model.train(first == (number < 2))(tokens(number))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_top_k_in_a_checkpoint_of_the_routers_own_is_refused(reentrant: bool) -> None:
    """Its recompute is no call of the router, so the gradient would go to the router's own choice."""

    def select(router: ToyRouter, scores: Scores) -> Pair:
        return checkpoint(as_function, router, scores, use_reentrant=reentrant)

    model = ToyModel(ToyRouter(select=select))
    untouched = run(model)
    with npu_replay.record(model) as recording:
        assert same(run(model), untouched)
    refused = pytest.raises(RouterError, match="a checkpoint of its own")
    with refused, npu_replay.replay(model, recording.routes):
        run(model)


def test_only_the_calling_thread_is_armed() -> None:
    """S3: another thread's top-k is its own."""
    own: list[bool] = []

    def in_another(scores: Scores) -> None:
        chosen = torch.topk(scores, TOPK).indices
        own.append(torch.equal(chosen, scores.argsort(dim=1, descending=True)[:, :TOPK]))

    def select(router: ToyRouter, scores: Scores) -> Pair:
        in_thread(lambda: in_another(scores.detach().clone()))
        return torch.topk(scores, router.topk)

    model = ToyModel(ToyRouter(select=select))
    with npu_replay.replay(model, foreign(layers=1)):
        model(tokens())
    assert own == [True]


def test_a_router_inside_a_router_has_its_own_answer() -> None:
    """S3: the armed slot saves and restores the outer one."""
    inner = ToyRouter(layer=1)
    chosen = []

    def select(router: ToyRouter, scores: Scores) -> Pair:
        inner(tokens(9))
        pair = torch.topk(scores, router.topk)
        chosen.append(pair[1].clone())
        return pair

    model = ToyModel(ToyRouter(layer=0, select=select))
    model.inner = inner
    routes = foreign(5)
    with npu_replay.replay(model, routes):
        for number in range(5):  # in micro-batch 3 both calls are quick, or would be
            model(tokens(number))
    assert same(chosen, [part.layer_ids(0).long() for part in routes])


def test_a_wrapper_that_is_taken_off_after_the_block_leaves_nothing_of_ours() -> None:
    """A library that patches torch.topk inside a block lays back, later, what it found there."""
    natives = torch.topk, torch.Tensor.topk
    scores = torch.rand(4, EXPERTS)
    with npu_replay.record(ToyModel()) as recording:
        recording.chunks[0](tokens())
        found = torch.topk, torch.Tensor.topk
        torch.topk = torch.Tensor.topk = wrapper = lambda *args, **kwargs: found[0](*args, **kwargs)
    assert torch.topk is wrapper
    assert torch.equal(torch.topk(scores, TOPK).indices, natives[0](scores, TOPK).indices)
    torch.topk, torch.Tensor.topk = found
    assert torch.equal(torch.topk(scores, TOPK).indices, natives[0](scores, TOPK).indices)
    assert torch.equal(scores.topk(TOPK).indices, natives[0](scores, TOPK).indices)
    assert (torch.topk, torch.Tensor.topk) == natives
    torch.topk = found[0]  # and where nobody called it: the next block takes it off
    with npu_replay.record(ToyModel()) as recording:
        recording.chunks[0](tokens())
    assert torch.topk is natives[0]
