"""The seam: which top-k is answered, how it is caught, and what its scores are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import topk as topk_taken_early
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.errors import MicroBatchError, NoEffect, RouterError
from npu_replay.sessions import backward, seam
from toys import EXPERTS, ROWS, TOPK, Select, ToyModel, ToyRouter, run, same, tokens

Scores = torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]


pytestmark = pytest.mark.usefixtures("toy_routers")


def foreign(layers: int = 2, seed: int = 5) -> RoutedExperts:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(ROWS, layers, EXPERTS, generator=generator).topk(TOPK).indices
    return RoutedExperts(ids=ids, layers=range(layers), num_experts=EXPERTS)


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
    routes = foreign()
    with npu_replay.replay(model, [routes]):
        model(tokens())
    handle.remove()
    values, ids = outputs[0]
    assert torch.equal(ids, routes.layer_ids(0).long())
    assert torch.equal(values, scores[0].gather(1, ids)), "weights of replayed experts are their live scores"
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
    return topk_taken_early(scores, router.topk)


def after_others(router: ToyRouter, scores: Scores) -> Pair:
    """S1: top-ks that look alike before the routing decision, and the aux loss's after it."""
    scores.view(len(scores), 1, EXPERTS).topk(router.topk)  # one group: three dimensions
    torch.topk(scores, router.topk, dim=0)
    torch.topk(scores, router.topk + 1)
    torch.topk(scores, router.topk, largest=False)
    torch.topk(scores[:-1], router.topk)
    torch.topk(scores[:, :-1], router.topk)
    chosen = torch.topk(scores, router.topk)
    torch.topk(scores.flip(1), router.topk)
    return chosen


@pytest.mark.parametrize("select", [as_function, as_method, by_keywords, through_an_alias, after_others])
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
    masked = scores.masked_fill(groups(scores), float("-inf"))
    torch.topk(masked.detach(), router.topk)
    return torch.topk(masked, router.topk)


@pytest.mark.parametrize("select", [again_with_grad, again_after_a_write, again_in_groups])
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


def test_a_name_taken_early_is_seen_by_the_safety_net_in_every_call() -> None:
    check(through_an_alias)
    model = ToyModel(ToyRouter(select=through_an_alias))
    with npu_replay.record(model) as recording:
        model(tokens(0)), model(tokens(1)), model(tokens(2))
    assert len(recording.routes) == 3


def test_what_one_block_has_learned_decides_nothing_in_the_next() -> None:
    """A router that calls torch.topk in eval mode, and a name that was taken early in training."""

    def select(router: ToyRouter, scores: Scores) -> Pair:
        return (through_an_alias if router.training else as_function)(router, scores)

    model = ToyModel(ToyRouter(select=select)).eval()
    with npu_replay.record(model) as recording:
        model(tokens(0)), model(tokens(1))
        model.train()
        model(tokens(2)), model(tokens(3))
    with npu_replay.replay(model, recording.routes):
        for number in range(4):
            model.train(number > 1)(tokens(number))


def groups(scores: Scores) -> torch.Tensor:
    """Bool [rows, experts]: outside of the two best of four groups."""
    best = scores.view(len(scores), 4, -1).amax(dim=2)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, torch.topk(best, 2).indices, True)
    return ~kept.repeat_interleave(EXPERTS // 4, dim=1)


def masked_fill(router: ToyRouter, scores: Scores) -> Pair:
    return scores.masked_fill(groups(scores), float("-inf")).topk(router.topk)


def masked_fill_with_zero(router: ToyRouter, scores: Scores) -> Pair:
    return torch.masked_fill(scores, groups(scores), 0.0).topk(router.topk)


def where(router: ToyRouter, scores: Scores) -> Pair:
    return torch.where(groups(scores), float("-inf"), scores).topk(router.topk)


def where_with_a_tensor(router: ToyRouter, scores: Scores) -> Pair:
    return scores.where(~groups(scores), torch.tensor(0.0)).topk(router.topk)


def masked_twice(router: ToyRouter, scores: Scores) -> Pair:
    last = torch.zeros(len(scores), EXPERTS, dtype=torch.bool)
    last[:, -1] = True
    return scores.masked_fill(groups(scores), 0.0).masked_fill(last, 0.0).topk(router.topk)


def after_another_mask(router: ToyRouter, scores: Scores) -> Pair:
    (scores * 2).masked_fill(groups(scores), 0.0)  # padding, say: another tensor's mask
    return torch.topk(scores, router.topk)


def filled_in_place(router: ToyRouter, scores: Scores) -> Pair:
    return scores.clone().masked_fill_(groups(scores), float("-inf")).topk(router.topk)


def assigned(number: float) -> Select:
    def select(router: ToyRouter, scores: Scores) -> Pair:
        masked = scores.clone()
        masked[groups(scores)] = number
        return masked.topk(router.topk)

    return select


def multiplied(router: ToyRouter, scores: Scores) -> Pair:
    return (scores * ~groups(scores)).topk(router.topk)


def multiplied_in_place(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.clone()
    masked *= (~groups(scores)).float()
    return torch.topk(masked, router.topk)


def added(router: ToyRouter, scores: Scores) -> Pair:
    return torch.topk(groups(scores).float() * -1e4 + scores, router.topk)


def subtracted_in_place(router: ToyRouter, scores: Scores) -> Pair:
    return scores.clone().sub_(groups(scores) * 1e4).topk(router.topk)


def by_groups(router: ToyRouter, scores: Scores) -> Pair:
    """In the shape of groups, and cast afterwards."""
    masked = scores.view(len(scores), 4, -1).half().clone()
    masked[groups(scores).view_as(masked)] = 1e-4
    return masked.flatten(1).float().topk(router.topk)


def through_a_view(router: ToyRouter, scores: Scores) -> Pair:
    masked = scores.clone()
    kept = ~groups(scores)
    for column in range(EXPERTS):
        masked[:, column].mul_(kept[:, column])
    return masked.topk(router.topk)


@pytest.mark.parametrize(
    "select",
    [
        *(masked_fill, masked_fill_with_zero, where, where_with_a_tensor, masked_twice, after_another_mask),
        *(filled_in_place, assigned(float("-inf")), assigned(-1.0), assigned(1e-9), multiplied),
        *(multiplied_in_place, added, subtracted_in_place, through_a_view),
    ],
)
def test_weights_come_from_the_scores_before_they_were_masked(select: Select) -> None:
    """S2: a replayed expert may lie in a group that is masked now."""
    check(select, masks=True)


def biased(router: ToyRouter, scores: Scores) -> Pair:
    """By a bias that is zero for half of the experts."""
    return torch.topk(scores + BIAS, router.topk)


def scaled(router: ToyRouter, scores: Scores) -> Pair:
    return torch.topk(scores * 2.5, router.topk)


BIAS = torch.linspace(-0.3, 0.3, EXPERTS) * (torch.arange(EXPERTS) % 2)


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

    model, routes = ToyModel(ToyRouter(select=reads, masks=True)), foreign(1)
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

    model, routes = ToyModel(ToyRouter(select=select, masks=True)), foreign(1)
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
    return torch.topk(torch.mul(scores.detach(), ~groups(scores), out=masked), router.topk)


def test_a_mask_that_is_written_into_a_buffer_is_seen() -> None:
    taken: list[tuple[Scores, Scores]] = []

    def reads(router: ToyRouter, scores: Scores) -> Pair:
        chosen = into_a_buffer(router, scores)
        taken.append((scores.detach(), chosen[0]))
        return chosen

    model, routes = ToyModel(ToyRouter(select=reads, masks=True)), foreign(1)
    with torch.no_grad(), npu_replay.replay(model, [routes]):
        model(tokens())
    assert torch.equal(taken[0][1], taken[0][0].gather(1, routes.layer_ids(0).long()))


@torch.jit.script
def scripted(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return scores * kept


def masked_in_script(router: ToyRouter, scores: Scores) -> Pair:
    return scripted(scores, ~groups(scores)).topk(router.topk)


@pytest.mark.parametrize("select", [masked_in_script])
def test_a_mask_that_cannot_be_seen_is_refused(select: Select) -> None:
    """S2: its weights would be NaN, or zero in silence."""
    model = ToyModel(ToyRouter(select=select, masks=True))
    with npu_replay.record(model):
        model(tokens())
    with pytest.raises(NoEffect), npu_replay.replay(model, [foreign(1)]):
        model(tokens())


@pytest.mark.parametrize("masks", [False, True])
def test_a_mask_of_a_router_that_is_described_without_one_is_named(masks: bool) -> None:
    model = ToyModel(ToyRouter(select=masked_fill, masks=masks))
    refused = (
        contextlib.nullcontext() if masks else pytest.raises(NoEffect, match="a mask that can't be seen")
    )
    with refused, npu_replay.replay(model, [foreign(1)]):
        model(tokens())


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


@pytest.mark.parametrize("masks", [False, True])
def test_a_replayed_expert_of_probability_zero_is_not_taken_for_a_mask(masks: bool) -> None:
    model = ToyModel(ToyRouter(masks=masks))
    with torch.no_grad():
        model.layers[0].router.weight.mul_(1e4)  # a softmax that is 0 or 1
    with npu_replay.replay(model, [foreign(1)]):
        model(tokens())


def saved_in(block: Any, run: Any) -> list[tuple[Any, ...]]:
    """What a forward saves for its backward."""
    saved: list[tuple[Any, ...]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: (saved.append((x.dtype, x.shape)), x)[1], lambda x: x
    )

    def watched(x: Scores) -> Scores:
        with hooks:
            return run(x)

    with block:
        checkpoint(watched, tokens().requires_grad_(), use_reentrant=False).sum().backward()
    return saved


def test_recording_has_the_autograd_shape_of_replaying() -> None:
    """S1: a non-reentrant checkpoint compares what is saved; top-k saves other tensors than gather."""
    model = ToyModel()
    recorded, replayed, pinned = (
        saved_in(block, model)
        for block in (
            npu_replay.record(model),
            npu_replay.replay(model, [foreign()]),
            npu_replay.pin_recompute(model),
        )
    )
    assert recorded == replayed == pinned


tells_regions = pytest.mark.skipif(
    not backward.TELLS_REGIONS,
    reason="torch 2.7 doesn't tell what may run a call again: ids are given each time",
)


@tells_regions
@pytest.mark.parametrize("kind", ["record", "pin_recompute"])
def test_a_call_that_nothing_can_run_again_has_the_values_of_the_routers_own_top_k(kind: str) -> None:
    """Without a gather; and with one where saved tensors are compared, or where the block gives the ids."""
    model, names = ToyModel(), []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    def gathers(run: Any) -> int:
        names.clear()
        with getattr(npu_replay, kind)(model), Seen():
            run(tokens().requires_grad_())
        return names.count("aten.gather.default")

    assert gathers(model) == 0
    assert gathers(lambda x: checkpoint(model, x, use_reentrant=False).sum().backward()) == 4


def test_a_call_that_an_interrupt_left_answers_nobodys_topk() -> None:
    """It skips the forward hook; the frame that ran the router has gone."""

    def interrupted(router: ToyRouter, scores: Scores) -> Pair:
        raise KeyboardInterrupt

    model, scores = ToyModel(ToyRouter(select=interrupted)), torch.rand(len(tokens()), EXPERTS)
    with pytest.raises(MicroBatchError, match="nothing ran"), npu_replay.record(model):
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        assert seam.is_running()
        call = seam.armed()
        torch.topk(scores, model.layers[0].router.topk)
        assert call is not None
        assert call.ids is None


@tells_regions
def test_ids_of_a_forward_that_raised_are_nobodys() -> None:
    def failing(router: ToyRouter, scores: Scores) -> Pair:
        torch.topk(scores, router.topk)
        raise ZeroDivisionError

    model = ToyModel(ToyRouter(), ToyRouter(select=failing))
    with npu_replay.record(model) as recording:
        with pytest.raises(ZeroDivisionError):
            model(tokens())
        assert not recording._work.kept
        model.layers[1].router.select = as_function
        model(tokens())


def test_a_record_under_inference_mode_is_that_of_any_other() -> None:
    """Its tensors don't tell whether they were written into."""
    model, found = ToyModel(), []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, npu_replay.record(model) as recording:
            model(tokens())
        found.append(recording.routes)
    assert found[0] == found[1]


def test_only_the_calling_thread_is_armed() -> None:
    """S3: another thread's top-k is its own."""
    inside: list[bool] = []
    routes = foreign(1)

    def select(router: ToyRouter, scores: Scores) -> Pair:
        def other() -> None:
            native = torch.topk(scores.detach().clone(), router.topk).indices
            inside.append(torch.equal(native, scores.sort(dim=1, descending=True).indices[:, :TOPK]))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return torch.topk(scores, router.topk)

    model = ToyModel(ToyRouter(select=select))
    with npu_replay.replay(model, [routes]):
        model(tokens())
    assert inside == [True]


def test_a_router_inside_a_router_has_its_own_answer() -> None:
    """S3: the armed slot saves and restores the outer one."""
    inner = ToyRouter(layer=1)

    def select(router: ToyRouter, scores: Scores) -> Pair:
        inner(tokens(9))
        return torch.topk(scores, router.topk)

    model = ToyModel(ToyRouter(layer=0, select=select))
    model.inner = inner
    routes = foreign(2)
    with npu_replay.observe(model) as seen, npu_replay.replay(model, [routes]):
        model(tokens())
    assert npu_replay.compare(seen.shown, [routes]).differing == 0


def test_torch_is_restored_when_the_last_block_ends() -> None:
    natives = torch.topk, torch.Tensor.topk
    one, two = ToyModel(), ToyModel()
    with npu_replay.record(one):
        assert torch.topk is not natives[0]
        with npu_replay.record(two):
            two(tokens())
        assert torch.topk is not natives[0]
        one(tokens())
    assert (torch.topk, torch.Tensor.topk) == natives
    assert "topk" not in vars(torch.Tensor)


def test_somebody_who_wraps_topk_meanwhile_keeps_his_wrapper() -> None:
    model = ToyModel()
    native = torch.topk
    try:
        with npu_replay.record(model):
            model(tokens())
            inner = torch.topk
            torch.topk = wrapper = lambda *args, **kwargs: inner(*args, **kwargs)
        assert torch.topk is wrapper
        scores = torch.rand(ROWS, EXPERTS)
        assert torch.equal(torch.topk(scores, TOPK).indices, native(scores, TOPK).indices)
        with npu_replay.record(model):
            model(tokens())
    finally:
        torch.topk = native


def test_a_wrapper_that_is_taken_off_after_the_block_leaves_nothing_of_ours() -> None:
    """A library that patches torch.topk inside a block lays back, later, what it found there."""
    natives = torch.topk, torch.Tensor.topk
    scores = torch.rand(ROWS, EXPERTS)
    with npu_replay.record(ToyModel()) as recording:
        recording.chunks[0](tokens())
        found = torch.topk, torch.Tensor.topk
        torch.topk = torch.Tensor.topk = lambda *args, **kwargs: found[0](*args, **kwargs)
    torch.topk, torch.Tensor.topk = found
    assert torch.equal(torch.topk(scores, TOPK).indices, natives[0](scores, TOPK).indices)
    assert torch.equal(scores.topk(TOPK).indices, natives[0](scores, TOPK).indices)
    assert (torch.topk, torch.Tensor.topk) == natives
    torch.topk = found[0]  # and where nobody called it: the next block takes it off
    with npu_replay.record(ToyModel()) as recording:
        recording.chunks[0](tokens())
    assert torch.topk is natives[0]


def test_the_safety_net_is_left_as_soon_as_the_top_k_is_caught() -> None:
    """Functions that a framework compiled would compile anew under a mode."""
    modes: list[object] = []

    def select(router: ToyRouter, scores: Scores) -> Pair:
        modes.append(torch.overrides._get_current_function_mode())
        chosen = torch.topk(scores, router.topk)
        modes.append(torch.overrides._get_current_function_mode())
        return chosen

    model = ToyModel(ToyRouter(select=select, masks=True))
    with npu_replay.record(model):
        model(tokens())
    assert isinstance(modes[0], seam.Watch)
    assert modes[1] is None
