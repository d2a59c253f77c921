"""Routers that are driven by upstream's API alone, on releases that have it and on those that lack it.

And the functions of moe_utils that frameworks import from later releases.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
import upstream_loop
from npu_replay import RoutedExperts
from npu_replay.compat.megatron_backports import moe_utils as moe_functions
from npu_replay.compat.megatron_backports import router_init, router_replay
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching import patches as patching
from npu_replay.errors import NoEffect, ReplayError, RouterError
from npu_replay.smoke import megatron_model
from upstream_loop import FLAG, api, build_replayed, upstream_api
from zoo.gpt import BATCH, LENGTH, MICRO_BATCHES, VARIANTS, Trainer, perturbed, routers, same

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    api()[0].clear_global_router_replay_action()
    api()[0].clear_global_router_replay_instances()


def as_routes(recorded: list[list[torch.Tensor]]) -> list[RoutedExperts]:
    """The same of ids [rows, topk] by layer."""
    return [
        RoutedExperts(ids=torch.stack(list(ids), dim=1), layers=[0, 1, 2, 3], num_experts=8)
        for ids in recorded
    ]


def blocks(trainer: Trainer, recorded: list[list[torch.Tensor]]) -> Any:
    """The same replay by npu_replay's own block."""
    with npu_replay.replay(trainer.model, as_routes(recorded)):
        return trainer.run("each")


class Foreign:
    """verl's before 0.9, whose patch of the router reads it and has no more than an action."""

    router_replay_action = "replay_forward"


class ForeignThatIsAsked(Foreign):
    """verl 0.9's, where npu_replay left its patch alone: its routing asks by itself."""

    asked = 0

    def get_replay_topk(self, *_: Any) -> None:
        self.asked += 1


@pytest.mark.parametrize("own", [Foreign, ForeignThatIsAsked])
def test_what_a_framework_hangs_on_a_router_for_its_own_routing_is_left_to_it(
    own: type[Foreign], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was asked for a method that it hasn't got; the other a second time, so its queue ran dry."""
    trainer = upstream_loop.build({})
    if api()[0] is not router_replay.MegatronRouterReplay:
        pytest.skip("upstream's own routing asks whatever hangs there")
    untouched = trainer.run("each")
    module = routers(trainer.model)[0].module
    plain = type(module).routing

    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            self.router_replay.get_replay_topk()
        return plain(self, *args, **kwargs)

    module.router_replay = own()
    if own is ForeignThatIsAsked:
        monkeypatch.setattr(type(module), "routing", routing)
    assert same(trainer.run("each"), untouched)
    assert getattr(module.router_replay, "asked", MICRO_BATCHES) == MICRO_BATCHES


# Where the release lacks it


@pytest.fixture
def ours() -> Any:
    if api()[0] is not router_replay.MegatronRouterReplay:
        pytest.skip("this Megatron-core has its own RouterReplay")
    return router_replay.MegatronRouterReplay


def test_a_model_that_was_thrown_away_shifts_nothing(ours: Any) -> None:
    """T18, N10: upstream's list keeps the routers of a model that was built and dropped."""
    dropped = build_replayed({})
    kept = upstream_loop.build(FLAG)
    assert len(ours.global_router_replay_instances) == 8
    del dropped
    gc.collect()
    assert len(ours.global_router_replay_instances) == 4
    assert ours.global_router_replay_instances == [
        router.module.router_replay for router in routers(kept.model)
    ]


def test_a_block_refuses_a_router_that_is_replaying_or_begins_to_inside_it() -> None:
    trainer = build_replayed({})
    ours, actions = api()
    forward = actions.REPLAY_FORWARD
    ours.set_replay_data([torch.tensor([[6, 1]]).expand(BATCH * LENGTH, 2)] * 4)
    begun = r"(?s)never reached its top-k.*RouterReplay was given inside the block"
    with pytest.raises(NoEffect, match=begun), npu_replay.record(trainer.model):
        ours.set_global_router_replay_action(forward)
        trainer.loss(trainer.batches[0])
    already = "RouterReplay is replaying on this router"
    with pytest.raises(RouterError, match=already), npu_replay.record(trainer.model):
        pass
    ours.clear_global_router_replay_action()
    ours.clear_global_indices()


def test_router_replay_records_beside_a_block_also_experts_that_are_masked_now() -> None:
    """The inner call has seen the mask, and the block's gathers the scores before it."""
    trainer = build_replayed(VARIANTS["groups_softmax"])
    with npu_replay.record(trainer.model) as recording:
        _, recorded = upstream_loop.record(trainer)
    for routes, layers in zip(recording.routes, recorded, strict=True):
        assert torch.equal(routes.ids.long(), torch.stack(layers, dim=1))
    apart = torch.tensor([0, 7]).expand(BATCH * LENGTH, 2)  # in the first group and in the last
    alone = blocks(trainer, [[apart] * 4] * MICRO_BATCHES)[0]
    with npu_replay.replay(trainer.model, as_routes([[apart] * 4] * MICRO_BATCHES)):
        losses, recorded = upstream_loop.record(trainer)
    assert losses == alone
    if api()[0] is router_replay.MegatronRouterReplay:  # upstream's records what the router would choose
        assert all(torch.equal(ids, apart) for layers in recorded for ids in layers)


def of_0_16(self: Any, logits: torch.Tensor, *_: Any, **__: Any) -> Any:
    """A routing as a framework writes it against 0.16."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return topk_routing_with_score_function(
        logits.view(-1, 8), self.topk, score_function="softmax", router_replay=self.router_replay
    )


def by_its_class(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A wrapper of one router that goes on to the class."""
    return type(self).routing(self, logits, *args, **kwargs)


@pytest.mark.parametrize("way", ["given by hand", "of 0.16", "by its class"])
def test_a_router_is_replayed_however_it_was_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these works on 0.16, so it has to here."""
    if way == "given by hand":
        api()[0].clear_global_router_replay_instances()
        trainer = upstream_loop.build({})
        for router in routers(trainer.model):
            router.module.router_replay = api()[0]()
    else:
        trainer = build_replayed({})
    modules = [router.module for router in routers(trainer.model)]
    if way == "of 0.16":
        monkeypatch.setattr(type(modules[0]), "routing", of_0_16)
    if way == "by its class":
        for module in modules:
            module.routing = types.MethodType(by_its_class, module)
    _, recorded = upstream_loop.record(trainer)
    with perturbed(trainer.model), torch.no_grad(), npu_replay.observe(trainer.model) as seen:
        for tokens, ids in zip(trainer.batches, recorded, strict=True):
            api()[0].set_global_router_replay_action(api()[1].REPLAY_FORWARD)
            api()[0].set_replay_data(ids)
            trainer.loss(tokens)
    api()[0].clear_global_router_replay_action()
    assert npu_replay.compare(seen.shown, as_routes(recorded)).differing == 0


def test_a_wrapped_get_replay_topk_is_asked_without_an_action_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NeMo-RL's, which decides by a state of its own."""
    trainer = build_replayed({})
    original = api()[0].get_replay_topk
    asked: list[Any] = []
    monkeypatch.setattr(
        api()[0],
        "get_replay_topk",
        lambda self, *args, **how: asked.append(self) or original(self, *args, **how),
    )
    untouched = trainer.run("each")
    with npu_replay.record(trainer.model):
        assert same(trainer.run("each"), untouched)
    assert len(asked) == 2 * 4 * MICRO_BATCHES


def test_a_copy_and_a_pickle_of_a_router_have_a_replay_of_their_own(ours: Any) -> None:
    module = routers(build_replayed({}).model)[0].module
    if any(isinstance(value, torch.distributed.ProcessGroup) for value in vars(module).values()):
        pytest.skip("this Megatron-core's routers hold process groups, which can't be copied")
    gc.collect()
    gc.disable()
    seen = weakref.ref(copy.deepcopy(module))
    gc.enable()
    assert seen() is None, (
        "a cycle: its weights would stay on the device until the garbage collector comes by"
    )
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.router_replay is not module.router_replay
        twin.router_replay.set_router_replay_action(api()[1].RECORD)
        twin(torch.randn(4, 2, twin.config.hidden_size))
        assert twin.router_replay.get_recorded_indices().shape == (8, 2)
        assert module.router_replay.get_recorded_indices() is None


def test_a_router_that_can_not_be_equipped_is_built_and_blocks_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork's router may lack what is asked of it; whoever wants no replay has a model all the same."""
    monkeypatch.setattr(import_hook, "_failures", {})

    monkeypatch.setattr(router_init, "_equip", lambda router: router.lacking)
    model = megatron_model.model(megatron_model.config())
    assert len([record for record in caplog.records if "has no attribute 'lacking'" in record.message]) == 1
    with pytest.raises(ReplayError, match=r"routers that are replayed failed: AttributeError"):
        npu_replay.record(model).__enter__()


@pytest.mark.parametrize("flag", [FLAG, {}], ids=["replayed", "not replayed"])
def test_turned_off_a_live_router_is_megatrons_own_and_turned_on_it_is_replayed(
    ours: Any, monkeypatch: pytest.MonkeyPatch, flag: dict[str, Any]
) -> None:
    """With an action set on it, and where a profiler or an offloading hook lies around `forward`."""
    trainer = upstream_loop.build(flag)
    untouched = trainer.run("each")
    for router in routers(trainer.model):
        router.module.forward = functools.partial(router.module.forward)
    _, recorded = upstream_loop.record(trainer) if flag else (None, [])
    with perturbed(trainer.model):
        live = trainer.run("each")
        with monkeypatch.context() as patch:
            patch.setattr(patching, "_is_on", False)
            got = upstream_loop.replay(trainer, recorded) if flag else trainer.run("each")
            assert same(got, live)
        if flag:
            assert same(upstream_loop.replay(trainer, recorded), blocks(trainer, recorded))
    assert same(trainer.run("each"), untouched)


# The counts for the expert bias: Megatron-core 0.16 to 0.19 lay the padding mask over the experts; on a real
# router, on every release: tests/matrix/test_routing.py


def over_experts(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """As Megatron-core 0.16 to 0.19."""
    if padding_mask is not None:
        routing_map = routing_map & (~padding_mask)
    self.local_tokens_per_expert += routing_map.sum(dim=0)


@pytest.mark.parametrize(
    ("flag", "variable", "on", "counts"),
    [
        (False, "", True, [2, 0, 2]),  # nobody asks
        (False, "1", True, [2, 1, 1]),
        (True, "", True, [2, 1, 1]),
        (True, "1", False, [2, 0, 2]),  # turned off
    ],
)
def test_padding_is_left_out_where_that_is_asked_for_and_else_a_router_counts_as_its_class_does(
    monkeypatch: pytest.MonkeyPatch, flag: bool, variable: str, on: bool, counts: list[int]
) -> None:
    router: Any = type("TopKRouter", (torch.nn.Module,), {"_apply_expert_bias": over_experts})()
    router.enable_expert_bias = True
    router.config = types.SimpleNamespace(moe_enable_routing_replay=flag)
    router.local_tokens_per_expert = torch.zeros(3)
    assert router_init.counts_padding(router)
    methods = router_init.RouterMethods(router, ["_apply_expert_bias"])
    router._apply_expert_bias = methods._apply_expert_bias
    monkeypatch.setenv("NPU_REPLAY_EXPERT_BIAS", variable)
    monkeypatch.setattr(patching, "_is_on", on)
    chosen = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    router._apply_expert_bias(chosen, padding_mask=torch.tensor([False, True, False]))
    assert router.local_tokens_per_expert.tolist() == counts
    router._apply_expert_bias(chosen)
    assert router.local_tokens_per_expert.tolist() == [counted + 2 for counted in counts]


# Functions of later releases, that frameworks import. What each means, and how all of them come and go, on
# every release: tests/matrix

LOGITS = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
IDS = torch.rand(24, 8, generator=torch.Generator().manual_seed(6)).argsort(dim=1)[:, :2]
"""Somebody else's choice, also of experts that the router would never take."""


@pytest.fixture
def lacking() -> Any:
    """The release's moe_utils, where that has no topk_routing_with_score_function of its own."""
    module: Any = import_module(moe_functions.MODULE)
    if "def topk_routing_with_score_function(" in Path(module.__file__).read_text():
        pytest.skip("the release's own function is called, whatever moe_utils holds")
    return module


def test_a_dense_output_holds_the_chosen_experts_alone_in_the_order_of_the_top_k(lacking: Any) -> None:
    probs, ids = lacking.topk_routing_with_score_function(LOGITS, 2, dense_output=True, use_pre_softmax=True)
    wanted = LOGITS.softmax(1).topk(2, dim=1)
    assert torch.equal(ids, wanted.indices)
    assert torch.equal(probs, wanted.values)


def test_a_function_that_calls_no_top_k_can_not_be_replayed_in_silence(
    lacking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = torch.ones(*LOGITS.shape, dtype=torch.bool)
    monkeypatch.setattr(lacking, "topk_softmax_with_capacity", lambda logits, *_, **__: (logits, chosen, 0))
    with upstream_api() as api, pytest.raises(NoEffect, match="calls no top-k"):
        lacking.topk_routing_with_score_function(LOGITS, 2, router_replay=api.new("REPLAY_FORWARD", IDS))
    with pytest.raises(NoEffect, match="no order for a dense output"):
        lacking.topk_routing_with_score_function(LOGITS, 2, dense_output=True)
    with pytest.raises(ValueError, match=r"came with 0\.14"):
        lacking.topk_routing_with_score_function(LOGITS, 2, fused=True)


def test_what_mindspeed_puts_in_the_place_of_the_releases_own_is_called(
    lacking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fix_router replaces the function in moe_utils, before us or after."""
    asked: dict[str, Any] = {}

    def mindspeeds(logits: torch.Tensor, topk: int, **options: Any) -> tuple[str, str, str]:
        asked.update(options)
        return "probs", "map", "tokens per expert"

    monkeypatch.setattr(lacking, "topk_softmax_with_capacity", mindspeeds)
    chosen = lacking.topk_routing_with_score_function(LOGITS, 2, scaling_factor=2.0)
    assert chosen == ("probs", "map")
    assert asked["scaling_factor"] == 2.0
