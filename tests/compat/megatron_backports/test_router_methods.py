"""compat.router_init: a router gets the methods that its class lacks or has wrong, until all is turned off.

What they say of a real router, on every release: tests/matrix/test_names.py and test_padding_mask.py.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.patching import patches as patching
from npu_replay.compat.patching.patches import Patches

NAMES = ["get_aux_loss_coeff", "is_aux_loss_enabled"]


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
    monkeypatch.setattr(router_init, "_methods", Patches("methods of TopKRouter"))


def equipped(router: Any) -> Any:
    router_init.lend(router, router_init.missing(router))
    return router


def bound(router: Any) -> list[str]:
    return [name for name in NAMES if name in vars(router)]


def test_a_method_of_the_class_or_of_the_instance_is_left_alone() -> None:
    router = equipped(Later("none"))
    assert bound(router) == ["is_aux_loss_enabled"]
    assert router.get_aux_loss_coeff("none") == 7.0
    assert router.is_aux_loss_enabled() is True, "and it is asked"
    own = equipped(Router("seq_aux_loss"))
    asked = [own.get_aux_loss_coeff(kind) for kind in ("none", "aux_loss", "seq_aux_loss")]
    assert asked == [0.0, 0.0, 0.25]
    without = equipped(Router("none"))
    assert (own.is_aux_loss_enabled(), without.is_aux_loss_enabled()) == (True, False)
    frameworks = Router()
    frameworks.is_aux_loss_enabled = lambda: "theirs"  # type: ignore[assignment]
    equipped(frameworks)
    assert frameworks.is_aux_loss_enabled() == "theirs"


# The counts for the expert bias: Megatron-core 0.16 to 0.19 lay the padding mask over the experts


def over_experts(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """As Megatron-core 0.16 to 0.19."""
    if padding_mask is not None:
        routing_map = routing_map & (~padding_mask)
    self.local_tokens_per_expert += routing_map.sum(dim=0)


def counting() -> Any:
    router = type("TopKRouter", (torch.nn.Module,), {"_apply_expert_bias": over_experts})()
    router.enable_expert_bias = True
    router.config = types.SimpleNamespace(moe_enable_routing_replay=True)
    router.local_tokens_per_expert = torch.zeros(3)
    return router


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
    router = equipped(counting())
    router.config.moe_enable_routing_replay = flag
    monkeypatch.setenv("NPU_REPLAY_EXPERT_BIAS", variable)
    monkeypatch.setattr(patching._switch, "on", on)
    chosen = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    router._apply_expert_bias(chosen, padding_mask=torch.tensor([False, True, False]))
    assert router.local_tokens_per_expert.tolist() == counts
    router._apply_expert_bias(chosen)
    assert router.local_tokens_per_expert.tolist() == [counted + 2 for counted in counts]
