"""Figures count what complete forwards have shown: a forward that raised, and is tried again, counts once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, NoEffect, RoutedExperts
from npu_replay.sessions.replay import StepReplay
from zoo.toys import EXPERTS, TOPK, ToyModel, ToyRouter, foreign, tokens

ROWS = 40
"""Two micro-batches of them are judged for their overlap."""
MICRO_BATCHES = 4


pytestmark = pytest.mark.usefixtures("toy_routers")


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
    found = []
    for one in recording.routes:
        other = torch.rand(*one.ids.shape[:2], EXPERTS, generator=generator).topk(TOPK).indices
        half = torch.rand(ROWS, 1, 1, generator=generator) < 0.5
        ids = torch.where(half, one.ids.long(), other)
        kept = torch.arange(ROWS) % 5 != 0
        found.append(
            RoutedExperts(ids=ids, layers=one.layers, num_experts=EXPERTS, recorded=kept, from_engine=True)
        )
    return found


Run = Callable[[Any, int], None]


LOOPS: dict[str, Callable[[ToyModel, list[RoutedExperts]], Any]] = {
    "in a list": functools.partial(npu_replay.replay, live_mismatch=True, min_overlap=0.01),
    "step by step": lambda of, _: StepReplay(of, live_mismatch=True, min_overlap=0.01),
}


def once(of: ToyModel, given: list[RoutedExperts]) -> Run:
    def run(session: Any, number: int) -> None:
        if isinstance(session, StepReplay):
            session.give(0, given[number])
        of(tokens(number, ROWS)).square().mean().backward()

    return run


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 2], ids=["in the first layer", "in the last layer"])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_raised_and_is_tried_again_counts_once(loop: str, at: int, kind: type[BaseException]) -> None:
    made = model()
    given = routes(made)
    run = once(made, given)

    def fails(*_: Any) -> None:
        raise kind

    def tried_again(session: Any, number: int) -> None:
        handle = made.layers[at].taken.register_forward_hook(fails)  # its router has chosen
        for _ in range(1 + number):
            with pytest.raises(kind):
                run(session, number)
        handle.remove()
        run(session, number)

    def figures(run: Run) -> dict[str, float]:
        with LOOPS[loop](made, given) as session:
            for number in range(MICRO_BATCHES):
                run(session, number)
        timed = ("microseconds", "seconds")
        return {k: v for k, v in (session.counts() | session.metrics()).items() if k not in timed}

    wanted = figures(run)
    assert figures(tried_again) == wanted
    assert (wanted["compared"], wanted["rows"]) == (MICRO_BATCHES * 3 * ROWS * 4 // 5, MICRO_BATCHES * ROWS)
    assert 0 < wanted["live_mismatch"] < 1
    # With a limit of one's own each micro-batch is judged: 64 rows of 0 and 1, and those of the other two.
    assert wanted["given"] == 2 * 3 * TOPK * 64
    assert 0 < wanted["shared"] < wanted["given"]
    checked = 4 if loop == "in a list" else 3  # the last one of a list, too
    assert wanted["chosen"] == checked * 3 * ROWS * TOPK
    assert 0 < wanted["dropped"] < wanted["chosen"]
    if loop == "step by step":
        assert (wanted["replayed"], wanted["bytes"]) == (3, MICRO_BATCHES * 3 * ROWS * TOPK)


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
    given = RoutedExperts(ids=ids, layers=range(4), num_experts=EXPERTS, from_engine=True)
    with (
        pytest.raises(NoEffect, match="layer 1"),
        StepReplay(chunks, errors_wait=True, min_overlap=0.001, live_mismatch=True) as session,
    ):
        for chunk, part in enumerate(chunks):
            session.give(chunk, given.only(session.labels(chunk)))
            part(tokens(chunk, 80))
        assert "layer 1" in str(session.errors.first)
        assert session.counts()["given"] == 2 * 80 * TOPK, "the second chunk alone"
        assert session.counts()["compared"] == 2 * 80


@pytest.mark.parametrize("skipped", [[1], [0], [3], [0, 1], [2, 3]])
def test_a_micro_batch_that_is_left_out_is_passed_over(skipped: list[int]) -> None:
    """One with a bad loss, say, or all that are left after PPO's early stop."""
    of = ToyModel()
    given = foreign(MICRO_BATCHES)
    early = skipped == [*range(skipped[0], MICRO_BATCHES)]
    with npu_replay.observe(of) as seen, npu_replay.replay(of, given) as session:
        for number in range(MICRO_BATCHES):
            if number not in skipped:
                of(tokens(number)).sum().backward()
            elif not early:
                session.skip()
            elif number == skipped[0]:
                session.skip(None)
    ran = [one for number, one in enumerate(given) if number not in skipped]
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
