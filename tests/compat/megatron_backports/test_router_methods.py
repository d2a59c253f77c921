"""compat.router_init: a router gets the methods that its class lacks, and gives them back.

What they say of a real router, on every release: tests/matrix/test_names.py.
"""

from __future__ import annotations

import copy
import gc
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

NAMES = ("get_aux_loss_coeff", "is_aux_loss_enabled")


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
    own = equipped(Router("seq_aux_loss"))
    asked = [own.get_aux_loss_coeff(kind) for kind in ("none", "aux_loss", "seq_aux_loss")]
    assert asked == [0.0, 0.0, 0.25]
    without = equipped(Router("none"))
    assert (own.is_aux_loss_enabled(), without.is_aux_loss_enabled()) == (True, False)


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
