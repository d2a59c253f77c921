"""Forwards that raise: an interrupt leaves nothing behind, and what is tried again counts once.

And micro-batches that a loop leaves out.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, NoEffect, RoutedExperts
from npu_replay.sessions.replay import StepReplay
from zoo.outcome import hooks, same
from zoo.toys import (
    EXPERTS,
    TOPK,
    TokenModel,
    ToyModel,
    ToyRouter,
    foreign,
    in_groups,
    opened,
    plain,
    run,
    token_ids,
    tokens,
)

NATIVE = torch.topk, torch.Tensor.topk
ROWS = 40
"""Two micro-batches of them are judged for their overlap."""
MICRO_BATCHES = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("toy_routers"),
]


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def interrupt_recompute(*_: object) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise KeyboardInterrupt


def behind_its_topk(router: ToyRouter, scores: torch.Tensor) -> Any:
    return interrupt(plain(router, scores))


PLACES: dict[str, Callable[[ToyModel, ToyRouter], Any]] = {
    "router": lambda model, router: setattr(router, "select", interrupt),
    "router's end": lambda model, router: setattr(router, "select", behind_its_topk),
    "hook": lambda model, router: router.register_forward_hook(interrupt),
    "model's hook": lambda model, router: model.register_forward_pre_hook(interrupt),
    "recompute": lambda model, router: router.register_forward_pre_hook(interrupt_recompute),
    "between": interrupt,
}


@pytest.mark.choice
@pytest.mark.parametrize("number", [0, 3], ids=["checked", "unchecked"])
@pytest.mark.parametrize("kind", ["record", "replay", "pin_recompute", "observe"])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_comes_out_and_leaves_nothing_behind(place: str, kind: str, number: int) -> None:
    model = ToyModel(ToyRouter(), ToyRouter(select=in_groups, masks=True), recompute="reentrant")
    router = model.layers[1].router
    untouched = run(model, 0)
    with pytest.raises(KeyboardInterrupt), opened(kind, model, 5):
        for seed in range(number):
            run(model, seed)
        handle = PLACES[place](model, router)
        run(model, number)
    if "hook" in place or place == "recompute":
        handle.remove()
    router.select = in_groups
    assert hooks(model) == 0
    assert (torch.topk, torch.Tensor.topk) == NATIVE
    assert torch._C._len_torch_function_stack() == 0
    assert not npu_replay.report().open_sessions
    assert same(run(model, 0), untouched)
    with opened("record", model):
        assert same(run(model, 0), untouched)


def test_an_evaluation_after_an_interrupted_pass_is_left_alone_by_follow() -> None:
    """As in a notebook: a cell is stopped in the pass for old log-probs, and the next one evaluates."""
    model = TokenModel("batch").train()
    batches = [token_ids(2, 6, seed) for seed in (1, 2)]
    with npu_replay.follow(model) as following:
        handle = model.body.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(input_ids=batches[0])
        handle.remove()
        with torch.no_grad():
            model.eval()(input_ids=batches[1])
            assert following.metrics()["recorded"] == 0
            model.train()(input_ids=batches[0])
        assert following.metrics()["recorded"] == 2


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
    del kept
    gc.collect()  # up to torch 2.7 the hooks of a checkpoint that raised stay on as long as its frame


def test_a_forward_inside_an_except_block_counts() -> None:
    model = ToyModel()
    with npu_replay.record(model) as recording:
        try:
            raise ValueError
        except ValueError:
            model(tokens())
    assert len(recording.routes) == 1


# Figures


def drops(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A router that loses the last expert of every token."""
    values, ids = torch.topk(scores, router.topk, dim=-1)
    return values, torch.cat([ids[:, :-1], ids[:, :1]], dim=1)


def model() -> ToyModel:
    return ToyModel(*(ToyRouter(select=drops, drops=True) for _ in range(3)))


def routes(of: ToyModel) -> list[RoutedExperts]:
    """An engine's, half of whose experts are the routers' own; each fifth row has none."""
    with torch.no_grad(), npu_replay.record(of) as recording:
        for number in range(MICRO_BATCHES):
            of(tokens(number, ROWS))
    generator = torch.Generator().manual_seed(0)
    mixed = []
    for own in recording.routes:
        other = torch.rand(*own.ids.shape[:2], EXPERTS, generator=generator).topk(TOPK).indices
        half = torch.rand(ROWS, 1, 1, generator=generator) < 0.5
        ids = torch.where(half, own.ids.long(), other)
        kept = torch.arange(ROWS) % 5 != 0
        mixed.append(
            RoutedExperts(ids=ids, layers=own.layers, num_experts=EXPERTS, recorded=kept, from_engine=True)
        )
    return mixed


LOOPS: dict[str, Callable[[ToyModel, list[RoutedExperts]], Any]] = {
    "in a list": functools.partial(npu_replay.replay, live_mismatch=True, min_overlap=0.01),
    "step by step": lambda of, _: StepReplay(of, live_mismatch=True, min_overlap=0.01),
}


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 2], ids=["in the first layer", "in the last layer"])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_raised_and_is_tried_again_counts_once(loop: str, at: int, kind: type[BaseException]) -> None:
    made = model()
    known = routes(made)

    def step(session: Any, number: int) -> None:
        if isinstance(session, StepReplay):
            session.give(0, known[number])
        made(tokens(number, ROWS)).square().mean().backward()

    def fails(*_: Any) -> None:
        raise kind

    def tried_again(session: Any, number: int) -> None:
        handle = made.layers[at].taken.register_forward_hook(fails)  # its router has chosen
        for _ in range(1 + number):
            with pytest.raises(kind):
                step(session, number)
        handle.remove()
        step(session, number)

    def figures(each: Callable[[Any, int], None]) -> dict[str, float]:
        with LOOPS[loop](made, known) as session:
            for number in range(MICRO_BATCHES):
                each(session, number)
        timed = ("microseconds", "seconds")
        return {k: v for k, v in (session.counts() | session.metrics()).items() if k not in timed}

    wanted = figures(step)
    assert figures(tried_again) == wanted
    assert (wanted["compared"], wanted["rows"]) == (MICRO_BATCHES * 3 * ROWS * 4 // 5, MICRO_BATCHES * ROWS)
    assert 0 < wanted["live_mismatch"] < 1
    # With a limit of one's own each micro-batch is judged: 64 rows of 0 and 1, and those of the other two.
    assert wanted["given"] == 2 * 3 * TOPK * 64
    assert 0 < wanted["shared"] < wanted["given"]
    checked = 4 if loop == "in a list" else 3  # the last one of a list, too
    assert wanted["chosen"] == checked * 3 * ROWS * TOPK
    assert wanted["dropped"] == wanted["chosen"] // TOPK
    if loop == "step by step":
        assert (wanted["replayed"], wanted["bytes"]) == (3, MICRO_BATCHES * 3 * ROWS * TOPK)


def test_a_row_that_dropped_an_expert_or_shows_too_many_cannot_be_replayed() -> None:
    dropping = model()
    with torch.no_grad(), npu_replay.observe(dropping) as seen:
        dropping(tokens(0, ROWS))
    (observed,) = seen.shown
    lost = (observed.shown < 0).any(dim=2).any(dim=1)
    assert lost.any()
    assert torch.equal(observed.recorded, ~lost)
    broad = ToyModel(ToyRouter(select=lambda router, scores: torch.topk(scores, router.topk + 1)))
    with torch.no_grad(), npu_replay.observe(broad) as seen:
        broad(tokens(0, ROWS))
    assert not seen.shown[0].recorded.any()


def wrongly(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A router that doesn't use what its top-k gave."""
    values, ids = torch.topk(scores, router.topk, dim=-1)
    return values, (ids + 1) % EXPERTS


def test_an_error_of_one_chunk_that_waits_leaves_nothing_to_be_judged_with_the_next() -> None:
    """Or the next one raised in the middle of a schedule, and what it raised was none of our errors."""
    chunks = [
        ToyModel(ToyRouter(layer=0), ToyRouter(layer=1, select=wrongly)),
        ToyModel(ToyRouter(layer=2), ToyRouter(layer=3)),
    ]
    ids = torch.rand(80, 4, EXPERTS, generator=torch.Generator().manual_seed(0)).topk(TOPK).indices
    engine_routes = RoutedExperts(ids=ids, layers=range(4), num_experts=EXPERTS, from_engine=True)
    with (
        pytest.raises(NoEffect, match="layer 1"),
        StepReplay(chunks, errors_wait=True, min_overlap=0.001, live_mismatch=True) as session,
    ):
        for chunk, part in enumerate(chunks):
            session.give(chunk, engine_routes.only(session.labels(chunk)))
            part(tokens(chunk, 80))
        assert "layer 1" in str(session.errors.first)
        assert session.counts()["given"] == 2 * 80 * TOPK, "the second chunk alone"
        assert session.counts()["compared"] == 2 * 80


@pytest.mark.parametrize("skipped", [[1], [0], [3], [0, 1], [2, 3]])
def test_a_micro_batch_that_is_left_out_is_passed_over(skipped: list[int]) -> None:
    """One with a bad loss, say, or all that are left after PPO's early stop."""
    of = ToyModel()
    micro_batches = foreign(MICRO_BATCHES)
    early = skipped == [*range(skipped[0], MICRO_BATCHES)]
    with npu_replay.observe(of) as seen, npu_replay.replay(of, micro_batches) as session:
        for number in range(MICRO_BATCHES):
            if number not in skipped:
                of(tokens(number)).sum().backward()
            elif not early:
                session.skip()
            elif number == skipped[0]:
                session.skip(None)
    ran = [micro_batch for number, micro_batch in enumerate(micro_batches) if number not in skipped]
    assert npu_replay.compare(ran, seen.shown).router_mismatch == 0
    figures = session.metrics()
    assert (figures["micro_batches"], figures["rows"]) == (len(ran), sum(map(len, ran)))


def test_what_cannot_be_skipped_is_refused() -> None:
    of = ToyModel()
    with (
        pytest.raises(MicroBatchError, match=r"fewer micro-batches left than are skipped.* at most 2, got 3"),
        npu_replay.replay(of, foreign(2)) as session,
    ):
        session.skip(3)
    with npu_replay.replay(of, foreign(1)) as session:
        handle = of.layers[1].register_forward_hook(lambda *_: session.skip())
        with pytest.raises(MicroBatchError, match="between two micro-batches"):
            of(tokens())
        handle.remove()
        session.skip()
