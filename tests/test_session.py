"""record, replay and pin_recompute: what they refuse, where, and that they leave nothing behind."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import RoutedExperts, recompute, routers
from npu_replay.errors import MicroBatchError, NoEffect, RecomputeError, ReplayError, RouterError
from toys import EXPERTS, ROWS, TOPK, ToyModel, ToyRouter, ToyRouters, hooks, run, same, tokens

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

NATIVE = torch.topk, torch.Tensor.topk


@pytest.fixture(autouse=True)
def toy_routers() -> Iterator[None]:
    routers.register("toy", ToyRouters())
    yield
    routers.unregister("toy")
    assert (torch.topk, torch.Tensor.topk) == NATIVE


def record(model: ToyModel, *seeds: int) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.record(model) as recording:
        for seed in seeds or (0,):
            model(tokens(seed))
    return recording.routes


def random_routes(model: ToyModel, *seeds: int) -> list[RoutedExperts]:
    generator = torch.Generator().manual_seed(5)
    layers = len(model.layers)
    return [
        RoutedExperts(
            ids=torch.rand(ROWS, layers, EXPERTS, generator=generator).topk(TOPK).indices,
            layers=range(layers),
            num_experts=EXPERTS,
        )
        for _ in seeds or (0,)
    ]


def check_usable(model: ToyModel, before: object) -> None:
    """After an error nothing is left, and the model works as it did."""
    assert hooks(model) == 0
    assert (torch.topk, torch.Tensor.topk) == NATIVE
    assert same(run(model, 0), before)
    assert len(record(model)) == 1


def says(*words: str) -> str:
    """A pattern for a message that has all these words, in this order."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)


# Bad input: refused on entering


def test_a_layer_that_the_routes_lack_is_refused_on_entering() -> None:
    model = ToyModel()
    before = run(model, 0)
    routes = RoutedExperts(ids=record(model)[0].ids[:, :1], layers=[0], num_experts=EXPERTS)
    message = says("micro-batch 0, layer 1", "missing", "Expected layers [0, 1]", "got [0]", "Usual cause")
    with pytest.raises(RouterError, match=message), npu_replay.replay(model, [routes]):
        pytest.fail("the block was entered")
    check_usable(model, before)


@pytest.mark.parametrize(
    ("ids", "experts", "words"),
    [
        (torch.arange(2).expand(ROWS, 2, 2), EXPERTS, ("another top-k", "Expected 3", "got 2")),
        (torch.arange(3).expand(ROWS, 2, 3), 8, ("another number of experts", "Expected 16", "got 8")),
    ],
)
def test_another_top_k_or_number_of_experts_is_refused_on_entering(
    ids: torch.Tensor, experts: int, words: tuple[str, ...]
) -> None:
    model = ToyModel()
    before = run(model, 0)
    routes = RoutedExperts(ids=ids, layers=[0, 1], num_experts=experts)
    message = says("micro-batch 0, layer 0", *words, "Usual cause")
    with pytest.raises(RouterError, match=message), npu_replay.replay(model, [routes]):
        pytest.fail("the block was entered")
    check_usable(model, before)


@pytest.mark.parametrize("outer", ["record", "replay", "pin_recompute"])
@pytest.mark.parametrize("inner", ["record", "replay", "pin_recompute"])
def test_blocks_on_the_same_router_do_not_nest(outer: str, inner: str) -> None:
    model = ToyModel()
    before = run(model, 0)
    routes = record(model)
    block = {
        "record": lambda: npu_replay.record(model),
        "replay": lambda: npu_replay.replay(model, routes),
        "pin_recompute": lambda: npu_replay.pin_recompute(model),
    }
    with block[outer]():
        count = hooks(model)
        message = says("layer 0", f"{inner} can't be opened inside {outer}", "Usual cause")
        with pytest.raises(RouterError, match=message), block[inner]():
            pytest.fail("the block was entered")
        assert hooks(model) == count, "the outer block is as it was"
        model(tokens())
    check_usable(model, before)


def test_a_model_without_routers_is_refused() -> None:
    """T36: an architecture that isn't known must not be passed over."""
    with pytest.raises(RouterError, match=says("Linear", "no router", "toy", "Usual cause")):
        npu_replay.record(torch.nn.Linear(2, 2)).__enter__()


def test_labels_must_be_clear() -> None:
    twice = ToyModel(ToyRouter(layer=3), ToyRouter(layer=3))
    with pytest.raises(RouterError, match=says("layer 3", "two routers", "layers.0", "layers.1")):
        npu_replay.record(twice).__enter__()
    some = ToyModel(ToyRouter(layer=3), ToyRouter())
    with pytest.raises(RouterError, match=says("layers.1", "some don't", "1 of 2")):
        npu_replay.record(some).__enter__()
    with pytest.raises(RouterError, match="sits in two chunks"):
        npu_replay.record([some, some]).__enter__()
    numbered = ToyModel(ToyRouter(layer=7), ToyRouter(layer=2))
    assert record(numbered)[0].layers == (2, 7)


def test_replay_takes_a_list_of_routes() -> None:
    model = ToyModel()
    routes = record(model)
    for wrong, words in (
        (routes[0], "a single"),
        ([], "no routes"),
        ([routes[0].ids], "isn't RoutedExperts"),
    ):
        with pytest.raises(MicroBatchError, match=words):
            npu_replay.replay(model, wrong)


# Bad input: refused in the offending forward


def test_another_token_count_is_refused_in_the_forward() -> None:
    model = ToyModel()
    before = run(model, 0)
    routes = record(model, 0, 1)
    message = says("micro-batch 1, layer 0", "number of tokens", "Expected 7 rows", "got 10", "Usual cause")
    with pytest.raises(MicroBatchError, match=message), npu_replay.replay(model, routes):
        model(tokens(0))
        model(tokens(1, rows=7))
    check_usable(model, before)


def test_one_micro_batch_too_many_is_refused_at_its_beginning() -> None:
    model = ToyModel()
    before = run(model, 0)
    reached = []
    with (
        pytest.raises(MicroBatchError, match=says("micro-batch 1", "more micro-batches", "Usual cause")),
        npu_replay.replay(model, record(model)),
    ):
        model(tokens(0))
        model.layers[0].register_forward_pre_hook(lambda *_: reached.append(1))
        model(tokens(1))
    model.layers[0]._forward_pre_hooks.clear()
    assert not reached
    check_usable(model, before)


def test_too_few_micro_batches_are_refused_on_leaving() -> None:
    model = ToyModel()
    before = run(model, 0)
    message = says("micro-batch 1", "fewer micro-batches", "Expected 2", "got 1", "Usual cause")
    with pytest.raises(MicroBatchError, match=message), npu_replay.replay(model, record(model, 0, 1)):
        model(tokens(0))
    check_usable(model, before)


def test_a_block_in_which_nothing_ran_is_an_error() -> None:
    model, other = ToyModel(), ToyModel()
    for block in (npu_replay.record(model), npu_replay.pin_recompute(model)):
        with pytest.raises(MicroBatchError, match="nothing ran"), block:
            other(tokens())


def by_sorting(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = scores.sort(dim=-1, descending=True)
    return values[:, : router.topk], ids[:, : router.topk]


def forced(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.topk(scores, router.topk, dim=-1)
    ids = torch.arange(len(scores) * router.topk).view(len(scores), -1) % EXPERTS
    return scores.gather(1, ids), ids


@pytest.mark.parametrize(
    ("select", "words"),
    [(by_sorting, "never reached its top-k"), (forced, "doesn't show the chosen experts")],
)
@pytest.mark.parametrize("kind", ["record", "replay"])
def test_a_router_without_an_effect_is_an_error_at_the_end_of_the_first_micro_batch(
    kind: str, select: object, words: str
) -> None:
    routes = random_routes(ToyModel())
    model = ToyModel(ToyRouter(), ToyRouter(select=select, bypass="the reason that its compat module knows"))
    before = run(model, 0)
    ended = False
    block = npu_replay.record(model) if kind == "record" else npu_replay.replay(model, routes)
    with pytest.raises(NoEffect, match=says("micro-batch 0, layer 1", words, "Usual cause")) as caught, block:
        model(tokens())
        ended = True
    assert not ended, "the error must come before an optimizer can step"
    if select is by_sorting:
        assert "the reason that its compat module knows" in str(caught.value)
    assert hooks(model) == 0
    assert same(run(model, 0), before)


def test_a_router_that_is_not_called_is_an_error_at_the_end_of_the_forward() -> None:
    model = ToyModel()
    model.layers[1].forward = lambda hidden: hidden
    with pytest.raises(NoEffect, match=says("layer 1", "was not called")), npu_replay.record(model):
        model(tokens())


def test_a_forward_past_call_is_an_error_at_the_second_live_call() -> None:
    """S1: it has no end, so every micro-batch would be number 0."""
    model = ToyModel()
    before = run(model, 0)
    with npu_replay.replay(model, random_routes(model)) as session:
        model.forward(tokens())
        with pytest.raises(MicroBatchError, match=says("micro-batch 0, layer 0", "past the __call__")):
            model.forward(tokens())
        session._timeline.bypassed = None
        model(tokens())
    check_usable(model, before)


def test_a_single_forward_past_call_is_an_error_on_leaving() -> None:
    model = ToyModel()
    with pytest.raises(MicroBatchError, match="not through the __call__"), npu_replay.record(model):
        model.forward(tokens())


def test_a_router_called_twice_in_one_forward_is_an_error() -> None:
    """T34: the second sequence would overwrite the first."""
    model = ToyModel()
    model.layers[1] = model.layers[0]
    with pytest.raises(MicroBatchError, match=says("layer 0", "called again")), npu_replay.record(model):
        model(tokens())


def test_chunks_that_ran_different_numbers_of_forwards_are_an_error() -> None:
    one, two = ToyModel(ToyRouter(layer=0)), ToyModel(ToyRouter(layer=1))
    with pytest.raises(MicroBatchError, match=r"different numbers.*\[2, 1\]"), npu_replay.record([one, two]):
        one(tokens()), two(tokens()), one(tokens())


def test_forwards_from_two_threads_are_refused() -> None:
    model = ToyModel()
    raised: list[Exception] = []

    def other() -> None:
        try:
            model(tokens())
        except ReplayError as error:
            raised.append(error)

    with npu_replay.record(model):
        model(tokens())
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "two threads" in str(raised[0])


# Exceptions


def test_the_bodys_own_exception_is_not_hidden() -> None:
    model = ToyModel(recompute="reentrant")
    before = run(model, 0)
    with pytest.raises(ZeroDivisionError), npu_replay.replay(model, random_routes(model, 0, 1)):
        model(tokens().requires_grad_())
        raise ZeroDivisionError
    check_usable(model, before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_a_router_leaves_nothing(error: type[BaseException]) -> None:
    model = ToyModel(ToyRouter(), ToyRouter(masks=True))
    before = run(model, 0)

    def fail(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise error("in the router")

    model.layers[1].router.select, kept = fail, model.layers[1].router.select
    with pytest.raises(error, match="in the router"), npu_replay.record(model):
        model(tokens())
    model.layers[1].router.select = kept
    assert torch.overrides._get_current_function_mode() is None
    scores = torch.rand(ROWS, EXPERTS)
    assert torch.equal(torch.topk(scores, TOPK).indices, scores.topk(TOPK).indices)
    check_usable(model, before)


def test_a_forward_that_raised_and_is_tried_again_does_not_shift_the_routes() -> None:
    """S1: what is kept is keyed by micro-batch, not appended to a list."""
    model = ToyModel()
    expected = record(model, 0, 1)
    second = model.layers[1]
    with npu_replay.record(model) as recording:
        model(tokens(0))
        handle = second.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(5))
        handle.remove()
        model(tokens(1))
    assert recording.routes == expected
    with npu_replay.replay(model, expected):
        handle = second.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(0))
        handle.remove()
        model(tokens(0)), model(tokens(1))


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_forward_that_raised_owes_no_recompute(how: str) -> None:
    """Its exception keeps its frames, and they its graph, alive."""
    model = ToyModel(recompute=how)
    with npu_replay.record(model) as recording:
        model(tokens())
        handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:
            model(tokens().requires_grad_())
        handle.remove()
    assert kept.value.__traceback__ is not None
    assert len(recording.routes) == 1


def test_a_forward_inside_an_except_block_counts() -> None:
    model = ToyModel()
    with npu_replay.record(model) as recording:
        try:
            raise ValueError
        except ValueError:
            model(tokens())
    assert len(recording.routes) == 1


def test_routes_are_there_only_when_the_block_has_ended() -> None:
    model = ToyModel()
    recording = npu_replay.record(model)
    with recording:
        model(tokens())
        with pytest.raises(ReplayError, match="complete when"):
            _ = recording.routes
    assert len(recording.routes) == 1
    with pytest.raises(ReplayError, match="entered before"), recording:
        pass


# Recompute


RECOMPUTE = ["reentrant", "non-reentrant"]


@pytest.mark.parametrize("kind", ["record", "replay", "pin_recompute"])
@pytest.mark.parametrize("how", [*RECOMPUTE, "whole reentrant", "whole non-reentrant"])
def test_leaving_the_block_before_backward_is_an_error(how: str, kind: str) -> None:
    """S1: the recompute after the block would choose anew, in silence."""
    model = ToyModel(recompute=None if "whole" in how else how)
    before = run(model, 0)
    block = {
        "record": npu_replay.record(model),
        "replay": npu_replay.replay(model, random_routes(model)),
        "pin_recompute": npu_replay.pin_recompute(model),
    }[kind]
    x = tokens().requires_grad_()
    with (
        pytest.raises(RecomputeError, match=says("micro-batch 0, layer 0", "2 router calls", "inside")),
        block,
    ):
        if "whole" in how:
            loss = checkpoint(model, x, use_reentrant=how == "whole reentrant").sum()
        else:
            loss = model(x).sum()
    del loss
    check_usable(model, before)


@pytest.mark.parametrize("how", RECOMPUTE)
def test_a_graph_that_is_gone_needs_no_backward(how: str) -> None:
    model = ToyModel(recompute=how)
    with npu_replay.record(model) as recording:
        model(tokens().requires_grad_())
    assert len(recording.routes) == 1


def test_a_forward_without_grad_needs_no_backward() -> None:
    model = ToyModel(recompute="reentrant")
    with npu_replay.record(model) as recording, torch.no_grad():
        output = model(tokens().requires_grad_())
    assert len(recording.routes) == len(output) // ROWS


def test_offloaded_activations_are_not_taken_for_a_recompute() -> None:
    """S1: other saved-tensor hooks look alike."""
    model = ToyModel()
    with npu_replay.record(model), torch.autograd.graph.save_on_cpu():
        output = model(tokens().requires_grad_())
    output.sum().backward()


@pytest.mark.parametrize("how", RECOMPUTE)
def test_a_recompute_of_a_forward_before_the_block_is_refused(how: str) -> None:
    model = ToyModel(recompute=how)
    before = run(model, 0)
    loss = model(tokens().requires_grad_()).sum()
    with npu_replay.replay(model, random_routes(model)):
        model(tokens())
        with pytest.raises(RecomputeError, match=says("in backward", "no forward of this block")):
            loss.backward()
    check_usable(model, before)


def test_a_torch_that_hides_its_autograd_facts_refuses_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel(recompute="reentrant")
    monkeypatch.setattr(recompute, "probe", lambda: "_current_autograd_node is gone")
    with npu_replay.record(model):
        with pytest.raises(RecomputeError, match=says("layer 1", "_current_autograd_node is gone", "turn")):
            run(model, 0)
        gc.collect()


def test_the_autograd_facts_hold_here() -> None:
    recompute.probe.cache_clear()
    assert recompute.probe() is None


def test_a_second_backward_recomputes_again() -> None:
    for how in RECOMPUTE:
        model, plain = ToyModel(recompute=how), ToyModel()
        routes = random_routes(model)
        grads = []
        for one in (plain, model):
            with npu_replay.replay(one, routes):
                loss = one(tokens().requires_grad_()).sum()
                loss.backward(retain_graph=True)
                loss.backward()
            grads.append([p.grad for p in one.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("how", RECOMPUTE)
def test_pin_recompute_keeps_nothing_when_the_graph_is_gone(how: str) -> None:
    model = ToyModel(recompute=how)
    with npu_replay.pin_recompute(model) as session:
        for seed in range(5):
            run(model, seed)
            gc.collect()
            assert not session._kept
            assert not session._pending
            assert len(session._timeline._ends) <= 1


def test_metrics_are_plain_numbers() -> None:
    model = ToyModel()
    with npu_replay.replay(model, record(model, 0, 1)) as session:
        model(tokens(0)), model(tokens(1))
    metrics = session.metrics()
    assert {k: metrics[k] for k in ("micro_batches", "rows", "rows_without_route")} == {
        "micro_batches": 2,
        "rows": 2 * ROWS,
        "rows_without_route": 0,
    }
    assert 0 < metrics["seconds"] < 10
