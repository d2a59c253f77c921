"""compat.mindspeed: what is refused, and in which words. What works is in tests/on_mindspeed/."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.errors import NoEffect, RouterError
from zoo.gpt import Trainer, build, hooks

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


def in_place(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def check_usable(trainer: Trainer) -> None:
    assert hooks(trainer.model) == 0
    with npu_replay.record(trainer.model) as recording:
        trainer.loss(trainer.batches[0]).backward()
    assert len(recording.routes) == 1


PRODUCTS = {  # MegatronAdaptor's import turns on the features that MindSpeed has added to its list
    "MindSpeed": (
        "mindspeed.megatron_adaptor",
        "mindspeed.args_utils",
    ),
    "MegatronAdaptor": (
        "megatron_adaptor",
        "megatron_adaptor.utils.args_utils",
    ),
}


@pytest.mark.parametrize(
    ("feature", "reason", "said_by"),
    [
        ("fix_router", "takes experts in turn", "the config"),
        *(("moe_tp_extend_ep", "drops score function", name) for name in PRODUCTS),
    ],
)
def test_a_feature_that_overrides_the_choice_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, feature: str, reason: str, said_by: str
) -> None:
    """Arguments that nobody has read yet aren't asked for: they would be parsed from sys.argv."""
    trainer = build({})
    arguments = SimpleNamespace(**{feature: True})
    if said_by == "the config":
        vars(trainer.model.config).update(vars(arguments))
    else:
        entry, place = PRODUCTS[said_by]
        in_place(monkeypatch, place, get_full_args=lambda: arguments)
        check_usable(trainer)
        in_place(monkeypatch, entry)
    message = rf"layers\.0.*MindSpeed's {feature} can't be replayed. Expected {feature}=False.*{reason}"
    with pytest.raises(RouterError, match=message), npu_replay.record(trainer.model):
        pass
    setattr(trainer.model.config, feature, False)
    setattr(arguments, feature, False)
    check_usable(trainer)


@pytest.mark.parametrize("routes", [True, False])
def test_routing_that_is_replaced_inside_a_block_has_to_reach_its_topk(
    monkeypatch: pytest.MonkeyPatch, routes: bool
) -> None:
    """As a repatch() in the middle of a block may do."""
    from megatron.core.transformer.moe import router as product

    trainer = build({})
    original = product.TopKRouter.routing

    def somebodys(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if routes:
            return original(self, logits, *args, **kwargs)
        probs = logits.flatten(0, -2).softmax(dim=-1)
        return probs, probs > probs.sort(dim=-1).values[..., -self.topk - 1, None]

    with monkeypatch.context() as patched, contextlib.ExitStack() as refused:
        if not routes:
            refused.enter_context(pytest.raises(NoEffect, match=r"micro-batch 1, .*never reached its top-k"))
        with npu_replay.record(trainer.model):
            trainer.loss(trainer.batches[0]).backward()
            patched.setattr(product.TopKRouter, "routing", somebodys)
            trainer.loss(trainer.batches[1])
    check_usable(trainer)


def test_a_wrapper_that_binds_anew_at_each_access_is_no_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tracing tools put it there."""
    from megatron.core.transformer.moe import router as product

    routing = product.TopKRouter.routing
    anew = type("Anew", (), {"__get__": lambda self, instance, owner: functools.partial(routing, instance)})
    monkeypatch.setattr(product.TopKRouter, "routing", anew())
    check_usable(build({}))


@pytest.mark.parametrize("block", [npu_replay.observe, npu_replay.record])
def test_a_block_that_is_refused_leaves_no_hook(block: Any) -> None:
    model = build({}, "full").model
    model.config.moe_fb_overlap = True
    with pytest.raises(RouterError, match="recomputes in a place that npu_replay doesn't know"):
        block(model).__enter__()
    assert hooks(model) == 0
