"""compat.router_init: a router gets the methods that its class lacks, and gives them back."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import types
import weakref
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.patching import patches as patching
from npu_replay.compat.patching.patches import Patches
from npu_replay.smoke import megatron_model

NAMES = ("get_aux_loss_coeff", "is_aux_loss_enabled")
SIGNATURES = {"get_aux_loss_coeff": ["self", "aux_loss_type"], "is_aux_loss_enabled": ["self"]}
"""Upstream's, from 0.14 on."""


class Router(torch.nn.Module):
    """Without any of the methods, as in Megatron-core 0.12 and 0.13."""

    def __init__(self, routing_type: str = "aux_loss", coefficient: float = 0.25) -> None:
        super().__init__()
        self.routing_type = routing_type
        self.config = types.SimpleNamespace(moe_aux_loss_coeff=coefficient)


class Later(Router):
    """Has one of the two."""

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        return 7.0


@pytest.fixture(autouse=True)
def patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group and a report of this test's own."""
    monkeypatch.setattr(patching, "_groups", [])
    monkeypatch.setattr(router_init, "_lent", weakref.WeakSet())
    monkeypatch.setattr(router_init, "_methods", Patches("methods of TopKRouter"))


def equipped(router: Any) -> Any:
    router_init.lend(router, [name for name in NAMES if not hasattr(type(router), name)])
    return router


def bound(router: Any) -> list[str]:
    return [name for name in NAMES if name in vars(router)]


def test_a_method_of_the_class_is_left_alone() -> None:
    router = equipped(Later("none"))
    assert bound(router) == ["is_aux_loss_enabled"]
    assert router.get_aux_loss_coeff("none") == 7.0
    assert router.is_aux_loss_enabled() is True, "and it is asked"


def test_a_method_of_the_instance_is_left_alone() -> None:
    """A framework binds its own there."""
    router = Router()
    router.is_aux_loss_enabled = lambda: "theirs"  # type: ignore[assignment]
    equipped(router)
    assert router.is_aux_loss_enabled() == "theirs"
    router_init._methods.undo()
    assert router.is_aux_loss_enabled() == "theirs"


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda router: pickle.loads(pickle.dumps(router)),
    "deepcopy of a module around it": lambda router: copy.deepcopy(torch.nn.ModuleList([router]))[0],
    "torch.save": lambda router: through_torch(router),
}


def through_torch(router: Any) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(router, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_methods_of_its_own(way: str) -> None:
    router = equipped(Router())
    other = COPIES[way](router)
    other.config.moe_aux_loss_coeff = 0.0
    assert (router.is_aux_loss_enabled(), other.is_aux_loss_enabled()) == (True, False)
    del router
    gc.collect()
    assert other.get_aux_loss_coeff("aux_loss") == 0.0
    router_init._methods.undo()
    assert bound(other) == []


def test_the_report_has_one_line_however_many_routers_there_are() -> None:
    routers = [equipped(Router()) for _ in range(3)]
    copy.deepcopy(routers[0])
    (line,) = npu_replay.report().patches
    assert line.where == "methods of each megatron.core.transformer.moe.router.TopKRouter"
    assert (line.why, line.reason) == ("as later releases have", "methods of TopKRouter")


def test_undone_all_routers_that_are_alive_are_as_before() -> None:
    routers = [Router() for _ in range(3)]
    before = [dict(vars(router)) for router in routers]
    for router in routers:
        equipped(router)
    assert patching.undo_all() == []
    assert [vars(router) for router in routers] == before
    assert npu_replay.report().patches == ()
    assert bound(equipped(routers[0])) == list(NAMES), "and they can be had again"
    assert len(npu_replay.report().patches) == 1


# Real routers


KINDS = {
    "none": {"moe_aux_loss_coeff": 0.0},
    "aux_loss": {"moe_aux_loss_coeff": 1e-2},
    "seq_aux_loss": {"moe_aux_loss_coeff": 1e-2},
    "sinkhorn": {"moe_aux_loss_coeff": 0.0},
}


def built(kind: str) -> Any:
    from megatron.core.transformer.moe.router import TopKRouter

    config = megatron_model.config(num_layers=1, moe_router_load_balancing_type=kind, **KINDS[kind])
    (router,) = (one for one in megatron_model.model(config).modules() if isinstance(one, TopKRouter))
    return equipped(router)


@pytest.mark.megatron
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("kind", KINDS)
def test_every_release_says_the_same_of_its_aux_loss(kind: str) -> None:
    """Frameworks call them on 0.12 and 0.13 too."""
    router = built(kind)
    coefficients = {asked: router.get_aux_loss_coeff(asked) for asked in (*KINDS, "global_aux_loss")}
    assert coefficients == dict.fromkeys(coefficients, 0.0) | {kind: KINDS[kind]["moe_aux_loss_coeff"]}
    assert router.is_aux_loss_enabled() is kind.endswith("aux_loss")
    for name, wanted in SIGNATURES.items():
        method = getattr(router, name)
        assert isinstance(method, types.MethodType)
        assert ["self", *inspect.signature(method).parameters] == wanted
