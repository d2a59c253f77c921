"""compat.mindspeed: what is refused, and in which words. What works is in tests/on_mindspeed/."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.errors import RouterError
from npu_replay.routers import functions
from zoo.gpt import Trainer, build, hooks, routers

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


def in_place(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def with_arguments(monkeypatch: pytest.MonkeyPatch, **arguments: bool) -> None:
    in_place(monkeypatch, "mindspeed.megatron_adaptor")
    in_place(monkeypatch, "mindspeed.args_utils", get_full_args=lambda: SimpleNamespace(**arguments))


def check_usable(trainer: Trainer) -> None:
    assert hooks(trainer.model) == 0
    with npu_replay.record(trainer.model) as recording:
        trainer.loss(trainer.batches[0]).backward()
    assert len(recording.routes) == 1


@pytest.mark.parametrize(
    ("feature", "reason", "said_by"),
    [
        ("fix_router", "takes experts in turn", "the config"),
        ("moe_tp_extend_ep", "drops score function", "the arguments"),
        ("moe_tp_extend_ep", "drops score function", "MegatronAdaptor's arguments"),
    ],
)
def test_a_feature_that_overrides_the_choice_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, feature: str, reason: str, said_by: str
) -> None:
    trainer = build({})
    with monkeypatch.context() as on:
        if said_by == "the config":
            on.setattr(trainer.model.config, feature, True, raising=False)
        elif said_by == "MegatronAdaptor's arguments":
            # Its import turns on the features that MindSpeed has added to its list.
            in_place(on, "megatron_adaptor")
            arguments = SimpleNamespace(**{feature: True})
            in_place(on, "megatron_adaptor.utils.args_utils", get_full_args=lambda: arguments)
        else:
            with_arguments(on, **{feature: True})
        message = rf"layers\.0.*MindSpeed's {feature} can't be replayed. Expected {feature}=False.*{reason}"
        with pytest.raises(RouterError, match=message), npu_replay.record(trainer.model):
            pass
    with_arguments(monkeypatch, **{feature: False})
    check_usable(trainer)


@pytest.mark.parametrize("of", ["mindspeed.args_utils", "megatron_adaptor.utils.args_utils"])
def test_arguments_that_nobody_has_read_yet_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Asked for, they would be parsed from sys.argv: only a part of the product was imported."""
    parsed: list[str] = []
    in_place(monkeypatch, of, get_full_args=lambda: parsed.append(of))
    check_usable(build({}))
    assert parsed == []


ENTRIES = {
    "MindSpeed": ("mindspeed.patch_utils", "MindSpeedPatchesManager", "mindspeed.megatron_adaptor"),
    "MegatronAdaptor": ("megatron_adaptor.patches.patch_manager", "PatchesManager", "megatron_adaptor"),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(
    ("applied", "imported"),
    [((True, False), False), ((True, False), True), ((True, True), False), ((False, False), False)],
)
def test_a_product_that_was_half_imported_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, applied: tuple[bool, bool], imported: bool
) -> None:
    """Its import raised between two patches, and somebody caught it.

    Where all are in place, MindSpeed's features may have been turned on by MegatronAdaptor's import.
    """
    registry, manager, entry = ENTRIES[name]
    trainer = build({})
    with monkeypatch.context() as broken:
        patches = {f"megatron.core.part{i}": SimpleNamespace(is_applied=on) for i, on in enumerate(applied)}
        in_place(broken, registry, **{manager: SimpleNamespace(patches_info=patches)})
        if imported:
            in_place(broken, entry)
        if applied == (True, False) and not imported:
            message = (
                rf"import {entry}: {name} is half imported. Expected all 2 .* got 1, without "
                rf"megatron\.core\.part1.*python -c 'import {entry}'"
            )
            with pytest.raises(RouterError, match=message), npu_replay.record(trainer.model):
                pass
        else:
            check_usable(trainer)
    check_usable(trainer)


@pytest.mark.parametrize(
    ("which", "when"),
    [
        ("TopKRouter.routing", "between two micro-batches"),
        ("TopKRouter.forward", "after the last"),
        ("topk", "between two micro-batches"),
        ("topk", "after the last"),
    ],
)
def test_routing_code_that_is_replaced_inside_a_block_is_named(
    monkeypatch: pytest.MonkeyPatch, which: str, when: str
) -> None:
    """As a repatch() in the middle of a block does: from there on the effect is not what was checked."""
    from megatron.core.transformer.moe import router as product

    trainer = build({})
    places = functions(routers(trainer.model))
    names = [name for name, owner, what in places if name.startswith(which) and hasattr(owner, what)]
    assert len(names) == 1, names
    owner, name = (product.TopKRouter, which.split(".")[1]) if "." in which else (product, names[0])
    original = getattr(owner, name)

    @functools.wraps(original, assigned=())
    def somebodys(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    where = "micro-batch 1" if when == "between two micro-batches" else "at the end of the block"
    problem = rf"{where}, {names[0]}: the code that routes was replaced"
    message = rf"(?s){problem}.*Expected megatron\..*got .*somebodys.*repatch"
    with (
        monkeypatch.context() as patched,
        pytest.raises(RouterError, match=message),
        npu_replay.record(trainer.model),
    ):
        trainer.loss(trainer.batches[0]).backward()
        patched.setattr(owner, name, somebodys)
        if when == "between two micro-batches":
            trainer.loss(trainer.batches[1])
    check_usable(trainer)


@pytest.mark.parametrize("owner", ["the instance", "a subclass"])
def test_routing_code_of_one_router_that_is_replaced_inside_a_block_is_named(owner: str) -> None:
    trainer = build({})
    router = routers(trainer.model)[2].module
    if owner == "a subclass":
        router.__class__ = type("OwnRouter", (type(router),), {})
    original = router.routing

    def somebodys(*args: Any, **kwargs: Any) -> Any:
        return original(*args[-1:], **kwargs)

    name = r"decoder\.layers\.2\.mlp\.router" if owner == "the instance" else "OwnRouter"
    message = rf"micro-batch 1, {name}\.routing: the code that routes was replaced.*got .*somebodys"
    with pytest.raises(RouterError, match=message), npu_replay.record(trainer.model):
        trainer.loss(trainer.batches[0])
        (router if owner == "the instance" else type(router)).routing = somebodys
        trainer.loss(trainer.batches[1])
    if owner == "the instance":
        del router.routing
    else:
        router.__class__ = type(router).__mro__[1]
    check_usable(trainer)


def test_a_wrapper_that_binds_anew_at_each_access_is_no_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tracing tools put it there."""
    from megatron.core.transformer.moe import router as product

    routing = product.TopKRouter.routing
    anew = type("Anew", (), {"__get__": lambda self, instance, owner: functools.partial(routing, instance)})
    monkeypatch.setattr(product.TopKRouter, "routing", anew())
    check_usable(build({}))


def test_observe_that_is_refused_leaves_no_hook() -> None:
    trainer = build({}, "full")
    trainer.model.config.moe_fb_overlap = True
    for block in (npu_replay.observe, npu_replay.record):
        with pytest.raises(RouterError, match="recomputes in a place that npu_replay doesn't know"):
            block(trainer.model).__enter__()
        assert hooks(trainer.model) == 0
    trainer.model.config.moe_fb_overlap = False
    check_usable(trainer)


# Megatron's own replay, from 0.16 on


def upstream() -> Any:
    replay = pytest.importorskip("megatron.core.transformer.moe.router_replay", reason="no RouterReplay here")
    replay.RouterReplay.clear_global_router_replay_instances()
    return replay


@pytest.mark.parametrize("action", ["REPLAY_FORWARD", "REPLAY_BACKWARD"])
def test_megatrons_own_replay_and_ours_at_once_are_refused(action: str) -> None:
    replay = upstream()
    trainer = build({"moe_enable_routing_replay": True})
    replay.RouterReplay.set_global_router_replay_action(replay.RouterReplayAction[action])
    message = rf"layers\.0.*RouterReplay is replaying.*clear_global_router_replay_action.*{action}"
    with pytest.raises(RouterError, match=message), npu_replay.record(trainer.model):
        pass
    replay.RouterReplay.clear_global_router_replay_action()
    check_usable(trainer)


# Arguments that a release, MindSpeed-LLM or a fork adds to a router's call


@pytest.mark.parametrize("passed", ["by name", "by place"])
def test_more_arguments_of_a_routers_call_reach_it_untouched(
    monkeypatch: pytest.MonkeyPatch, passed: str
) -> None:
    """T7: a routing function of one's own, with Megatron 0.12's signature, met a padding_mask."""
    from megatron.core.transformer.moe import router as product

    got: list[Any] = []
    original = product.TopKRouter.forward

    def forward(self: Any, input: torch.Tensor, padding_mask: Any = None, input_ids: Any = None) -> Any:
        got.append((padding_mask, input_ids))
        return original(self, input)

    monkeypatch.setattr(product.TopKRouter, "forward", forward)
    router = routers(build({}).model)[0].module
    mask = object()
    ids = object()
    hidden = torch.randn(6, 2, router.config.hidden_size, device=router.weight.device)
    with npu_replay.record(router) as recording:
        if passed == "by name":
            router(hidden, padding_mask=mask, input_ids=ids)
        else:
            router(hidden, mask, ids)
    assert got == [(mask, ids)]
    assert len(recording.routes[0]) == 12
