"""follow with routes that come with the call itself, padded or packed as its ids are (R3)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, ReplayError

pytest.importorskip("transformers")

from sessions.test_follow import (
    EXPERTS,
    LAYERS,
    LAYOUTS,
    TOPK,
    Fed,
    Seen,
    assert_replayed,
    learn,
    model,
    padded,
    record,
    texts,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*requires_grad=True:UserWarning"),
    pytest.mark.usefixtures("unjudged"),
]


def rollout(fed: Fed, seed: int = 0) -> list[list[torch.Tensor]]:
    """What an engine chose: by sequence and layer, sorted ids [tokens, topk]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.rand(len(place), EXPERTS, generator=generator).topk(TOPK).indices.sort(1).values
            for _ in range(LAYERS)
        ]
        for place in fed[1]
    ]


def carried(fed: Fed, routes: list[list[torch.Tensor]], empty: int = 0) -> torch.Tensor:
    """[batch, sequence, layers, topk], as ms-swift's collate has them: int64, padding is zeros."""
    ids = fed[0]["input_ids"]
    rows = torch.full((ids.numel(), LAYERS, TOPK), empty)
    for place, layers in zip(fed[1], routes, strict=True):
        rows[place] = torch.stack(layers, dim=1)
    return rows.view(*ids.shape, LAYERS, TOPK)


@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("last", [True, False], ids=["", "the last token has none"])
@pytest.mark.parametrize("keyword", ["routed_experts", "rollout_expert_indices"])
def test_each_call_takes_the_routes_that_it_carries(
    keyword: str, last: bool, layout: str, recompute: str | None
) -> None:
    """A sequence's last token may lack its route: it then chooses by itself, as padding does."""
    followed = model(recompute=recompute)
    fed = LAYOUTS[layout](texts())
    if not last:
        fed = fed[0], [place[:-1] for place in fed[1]]
    wanted = rollout(fed)
    call = fed[0] | {keyword: carried(fed, wanted, empty=-1 if layout == "left" else 0)}
    before = call[keyword].clone()
    seen = Seen(followed)
    forward = followed.forward
    inside = []
    followed.forward = lambda *args, **kwargs: inside.append(set(kwargs)) or forward(*args, **kwargs)
    with npu_replay.follow(followed, mode="R3") as following:
        for run in (record, learn):
            run(followed, (call, fed[1]))
            assert_replayed(seen, fed, wanted)
        metrics = following.metrics()
    assert torch.equal(call[keyword], before)
    assert len(inside) == 2
    assert all(keyword not in names for names in inside)
    assert (metrics["carried"], metrics["recorded"], metrics["held"]) == (2, 0, 0)


def test_a_token_before_a_padded_end_needs_its_route() -> None:
    followed = model()
    fed = LAYOUTS["packed to 16, padded end of its own positions"](texts())
    whole = carried(fed, rollout(fed))
    holed = whole.clone()
    holed[0, fed[1][-1][-2]] = 0
    with npu_replay.follow(followed, mode="R3"):
        with pytest.raises(ReplayError, match="a token has no route"):
            learn(followed, (fed[0] | {"routed_experts": holed}, fed[1]))
        learn(followed, (fed[0] | {"routed_experts": whole}, fed[1]))


def test_the_columns_may_be_all_decoder_layers() -> None:
    followed = model(num_hidden_layers=4, mlp_only_layers=[1])
    ids = torch.arange(2, 12)[None]
    generator = torch.Generator().manual_seed(0)
    routes = torch.rand(1, 10, 4, EXPERTS, generator=generator).topk(TOPK).indices
    routes[:, :, 1] = 0
    seen = Seen(followed)
    with npu_replay.follow(followed, mode="R3"):
        followed(ids, routed_experts=routes)
        taken = torch.stack([chosen for _, chosen, _ in seen.calls], dim=1)
        assert torch.equal(taken, routes[0][:, [0, 2, 3]].sort(2).values)
        routes[0, 4, 1] = 3
        with pytest.raises(ReplayError, match="a dense layer has experts"):
            followed(ids, routed_experts=routes)


def test_a_call_with_images_may_carry_its_routes() -> None:
    """Found by its tokens it couldn't be; and time, height and width don't count up in an image."""
    followed = model()
    fed = padded(texts(), left=2)
    embeds = followed.get_input_embeddings()(fed[0]["input_ids"]).detach()
    positions = torch.arange(13)[None, None].expand(3, 5, -1).clone()
    positions[:, :, 5:9] = 5
    call = {"inputs_embeds": embeds, "attention_mask": fed[0]["attention_mask"], "position_ids": positions}
    call["routed_experts"] = carried(fed, wanted := rollout(fed))
    # A text model takes no such positions: they go by the way of a wrapper.
    forward = followed.forward
    followed.forward = lambda *args, position_ids, **kwargs: forward(*args, **kwargs)
    seen = Seen(followed)
    with npu_replay.follow(followed, mode="R3"):
        learn(followed, (call, fed[1]))
    assert_replayed(seen, fed, wanted)


def test_calls_that_are_left_alone_go_on_without_the_keyword() -> None:
    """An evaluation with a rollout's routes; and with carried routes, a rollout that was put is not asked."""
    followed = model()
    fed = padded(texts())
    free = record(followed, fed, seen := Seen(followed))
    call = fed[0] | {"routed_experts": carried(fed, rollout(fed))}
    with npu_replay.follow(followed, mode="R3") as following:
        learn(followed, (call, fed[1]))
        followed.eval()
        seen.calls.clear()
        again = record(followed, (call, fed[1]), seen)
        assert all(map(torch.equal, chain.from_iterable(again), chain.from_iterable(free)))
        assert following.left_alone == {"in eval mode": 1}


def bad(change: Callable[[torch.Tensor], Any]) -> Callable[[Fed], dict[str, Any]]:
    """A call whose routes are changed so."""
    return lambda fed: fed[0] | {"routed_experts": change(carried(fed, rollout(fed)))}


def put(value: Any, *place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(routes: torch.Tensor) -> torch.Tensor:
        routes[place] = torch.tensor(value)
        return routes

    return change


def constant(routes: torch.Tensor) -> torch.Tensor:
    routes[:, :, 1] = torch.tensor([0, 1])
    routes[:, :, 1][~(routes[:, :, 0] != 0).any(-1)] = 0
    return routes


BAD: dict[str, tuple[Callable[[Fed], dict[str, Any]], str]] = {
    "none": (lambda fed: fed[0], "no routes are known.*enable_return_routed_experts"),
    "a token without": (bad(put(0, 2, 3)), "a token has no route, and isn't the last of its sequence"),
    "padding with": (bad(put([1, 2], 0, -1)), "padding has a route"),
    "moved by one": (bad(lambda routes: routes.roll(1, 1)), "padding has a route|a token has no route"),
    "too short": (bad(lambda routes: routes[:, 1:]), "another shape than its ids"),
    "another top-k": (bad(lambda routes: routes[..., :1]), "another shape than its ids"),
    "flat": (bad(lambda routes: routes.flatten(2)), "another shape than its ids"),
    "a layer too few": (bad(lambda routes: routes[:, :, 1:]), "another number of layers than the model"),
    "an expert too far": (bad(put(EXPERTS, 4, 2, 1, 0)), "out of range|not between|of 8"),
    "an expert twice": (bad(put(3, 4, 2, 1)), "twice"),
    "one layer constant": (bad(constant), "same"),
    "floats": (bad(lambda routes: routes.float()), "integer"),
}


@pytest.mark.choice
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_routes_that_cannot_be_the_calls_are_refused(what: str, grad: bool) -> None:
    make_call, message = BAD[what]
    followed = model()
    fed = padded(texts(8), right=1)
    with npu_replay.follow(followed, mode="R3") as following:
        with pytest.raises(ReplayError, match=message) as caught, torch.set_grad_enabled(grad):
            followed(**make_call(fed))
        assert isinstance(caught.value, MicroBatchError) or "micro-batch 0" in str(caught.value)
        learn(followed, (bad(lambda routes: routes)(fed), fed[1]))  # and what follows is in order
        assert (following.metrics()["carried"], following.metrics()["recorded"]) == (1, 0)


def test_routes_of_another_batch_are_found_by_the_live_choice() -> None:
    followed = model()
    fed = padded(texts(8))
    call = fed[0] | {"routed_experts": carried(fed, rollout(fed))}
    with (
        pytest.raises(ReplayError, match="far from what the routers would choose"),
        npu_replay.follow(followed, mode="R3", min_overlap=0.9),  # as asked for, whatever the variable says
    ):
        learn(followed, (call, fed[1]))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ReplayError, match="'R2' or 'R3'"):
        npu_replay.follow(model(), mode="r3")  # type: ignore[arg-type]


def test_zeros_of_a_top_1_model_are_expert_0_where_a_route_has_to_be() -> None:
    """A last token may have none: it chooses by itself."""
    followed = model(num_experts_per_tok=1)
    ids = torch.arange(2, 12)[None]
    generator = torch.Generator().manual_seed(0)
    routes = torch.rand(1, 10, LAYERS, EXPERTS - 1, generator=generator).topk(1).indices + 1
    routes[0, [3, 9]] = 0
    seen = Seen(followed, own=False)
    followed(ids)
    free = seen.calls[0][1]
    seen.calls.clear()
    with npu_replay.follow(followed, mode="R3"):
        followed(ids, routed_experts=routes)
    for layer, taken, _ in seen.calls:
        assert torch.equal(taken[:9], routes[0, :9, layer])
    assert torch.equal(seen.calls[0][1][9], free[9])
