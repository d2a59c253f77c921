"""An interrupt comes out of a block, and leaves nothing behind, wherever the loop was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import npu_replay
from zoo.outcome import hooks, same
from zoo.toys import TokenModel, ToyModel, ToyRouter, in_groups, opened, plain, run, token_ids

pytestmark = pytest.mark.usefixtures("toy_routers")

NATIVE = torch.topk, torch.Tensor.topk


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
