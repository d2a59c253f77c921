"""RouterReplay for the releases that lack it, without a model. Its meaning on every release: tests/matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from npu_replay.compat.megatron.routers import is_replaying
from npu_replay.compat.megatron_backports.router_init import counts_padding
from npu_replay.compat.megatron_backports.router_replay import (
    Asked,
    RouterReplayAction,
    asking,
)
from npu_replay.compat.megatron_backports.router_replay import MegatronRouterReplay as RouterReplay
from npu_replay.errors import RouterError
from npu_replay.seam.plan import Plan

RECORD, FORWARD, BACKWARD = RouterReplayAction
SCORES = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.0, 0.2, 0.1]])


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


ids = torch.tensor


def replaying(target: torch.Tensor | None) -> RouterReplay:
    replay = RouterReplay()
    replay.layer_number = 7
    if target is not None:
        replay.set_target_indices(target)
    replay.set_router_replay_action(FORWARD)
    return replay


def asked(replay: RouterReplay) -> Asked:
    return Asked(replay, Plan(num_experts=4, topk=2, is_given=is_replaying(replay)), rows=2)


def top(k: int) -> list[list[int]]:
    return torch.topk(SCORES, k, dim=1).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_replay_gathers_the_targets_scores(dtype: torch.dtype) -> None:
    """N4: narrow ids are taken as they come from an engine."""
    target = ids([[3, 0], [2, 1]]).to(dtype)
    scores = SCORES.clone().requires_grad_()
    values, indices = replaying(target).get_replay_topk(scores, 2)
    assert indices.dtype == torch.int64
    assert torch.equal(indices, target.long())
    values.sum().backward()
    assert torch.equal(scores.grad, torch.zeros_like(SCORES).scatter(1, indices, 1.0))


@pytest.mark.parametrize("wrong", [torch.rand(2, 2), SCORES > 0, torch.zeros(4, dtype=torch.int64), None])
def test_targets_that_are_no_ids_are_refused_when_they_are_set(wrong: object) -> None:
    with pytest.raises(RouterError, match="these are no expert ids"):
        RouterReplay().set_target_indices(wrong)


@pytest.mark.parametrize("target", [None, ids([[0, 1]]), ids([[0, 1, 2], [0, 1, 2]])])
def test_a_replay_without_a_fitting_target_says_what_came(target: torch.Tensor | None) -> None:
    """N5: upstream's is an AttributeError of None, or goes on with fewer rows."""
    replay = replaying(target)
    with pytest.raises(RouterError, match=r"layer_number 7.*REPLAY_FORWARD has no ids.*\[2, 2\]"):
        replay.get_replay_topk(SCORES, 2)
    replay.clear_indices()
    replay.set_router_replay_action(BACKWARD)
    queued = [[[3, 2], [3, 2]], [[0, 1], [0, 1]]]
    for rows in queued:
        replay.set_target_indices(ids(rows))
    assert [replay.get_replay_topk(SCORES, 2)[1].tolist() for _ in queued] == queued
    with pytest.raises(RouterError, match=r"REPLAY_BACKWARD has no ids.*more recomputes than targets"):
        replay.get_replay_topk(SCORES, 2)


def test_the_next_top_k_that_fits_asks_and_the_one_after_it_not() -> None:
    with asking(asked(replaying(ids([[3, 2], [3, 2]])))):
        assert top(1) == [[1], [0]]
        assert top(2) == [[3, 2], [3, 2]]
        assert top(2) == [[1, 3], [0, 2]]
    assert top(2) == [[1, 3], [0, 2]]


def test_torch_is_changed_while_a_replay_has_an_action() -> None:
    """Setting names of torch in each call would cost more than the call."""
    native = torch.topk
    recording = RouterReplay()
    other = replaying(None)
    recording.set_router_replay_action(RECORD)
    other.clear_router_replay_action()
    with asking(asked(recording)):
        assert top(2) == [[1, 3], [0, 2]]
    assert torch.topk is not native
    recording.clear_router_replay_action()
    assert torch.topk is native
    recording.set_router_replay_action(RECORD)
    RouterReplay.clear_global_router_replay_instances()
    del recording  # a model that is discarded in an action
    assert torch.topk is native


def test_what_is_no_action_is_refused() -> None:
    with pytest.raises(ValueError, match="3 is not a valid RouterReplayAction"):
        RouterReplay().set_router_replay_action(3)  # type: ignore[arg-type]


def test_no_top_k_at_all_is_fine_without_an_action() -> None:
    """With one it is an error: test_router_init.py."""
    with asking(asked(RouterReplay())):
        torch.argsort(SCORES)


def test_a_routing_that_asks_by_itself_has_taken_its_top_k() -> None:
    """As one that was written for 0.16 does, inside the router's call."""
    replay = replaying(ids([[3, 2], [3, 2]]))
    with asking(asked(replay)):
        assert replay.get_replay_topk(SCORES, 2)[1].tolist() == [[3, 2], [3, 2]]


def test_a_top_k_down_the_rows_is_no_drop_without_a_capacity(caplog: pytest.LogCaptureFixture) -> None:
    """Quantile balancing takes one on 0.19, after the routing's own."""
    replay = replaying(ids([[3, 0], [2, 1]]))
    with asking(asked(replay)):
        assert top(2) == [[3, 0], [2, 1]]
        assert torch.topk(SCORES, 1, dim=0).indices.tolist() == [[1, 0, 0, 0]]
    assert not caplog.records


def test_a_method_that_hides_its_names_is_lent_where_it_counts_padding() -> None:
    """MindSpeed's stand-in for torch.compile returns a function of *args and **kwargs."""

    class Hidden:
        enable_expert_bias = True

        def _apply_expert_bias(self, *fn_args: Any, **fn_kwargs: Any) -> None: ...

    class Older(Hidden):
        def _apply_expert_bias(self, routing_map: torch.Tensor) -> None: ...

    assert counts_padding(Hidden())
    assert not counts_padding(Older())
