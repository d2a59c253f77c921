"""compat.megatron_backports.moe_utils: what frameworks import from later releases.

What each function means, and how all of it comes and goes, is in tests/matrix on every release.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.compat.megatron_backports import moe_utils as moe_functions
from npu_replay.errors import NoEffect
from router_replay_api import upstream_api

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

LOGITS = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
IDS = torch.rand(24, 8, generator=torch.Generator().manual_seed(6)).argsort(dim=1)[:, :2]
"""Somebody else's choice, also of experts that the router would never take."""


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    npu_replay.install()


def native(name: str) -> bool:
    """Does the source of the release on the path define it?"""
    return f"def {name}(" in Path(import_module(moe_functions.MODULE).__file__ or "").read_text()


@pytest.fixture
def moe_utils() -> Any:
    return import_module(moe_functions.MODULE)


def topk(**options: Any) -> Any:
    return import_module(moe_functions.MODULE).topk_routing_with_score_function(LOGITS, 2, **options)


def test_a_function_that_calls_no_top_k_can_not_be_replayed_in_silence(
    moe_utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native("topk_routing_with_score_function"):
        pytest.skip("the release's own function is called, whatever moe_utils holds")
    chosen = torch.ones(*LOGITS.shape, dtype=torch.bool)
    monkeypatch.setattr(moe_utils, "topk_softmax_with_capacity", lambda logits, *_, **__: (logits, chosen, 0))
    with upstream_api() as api, pytest.raises(NoEffect, match="calls no top-k"):
        topk(router_replay=api.new("REPLAY_FORWARD", IDS))
    with pytest.raises(ValueError, match=r"came with 0\.14"):
        topk(fused=True)


def test_what_mindspeed_puts_in_the_place_of_the_releases_own_is_called(
    moe_utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fix_router replaces the function in moe_utils, before us or after."""
    if native("topk_routing_with_score_function"):
        pytest.skip("MindSpeed replaces no routing function of this release")
    asked: dict[str, Any] = {}

    def mindspeeds(logits: torch.Tensor, topk: int, **options: Any) -> tuple[str, str, str]:
        asked.update(options)
        return "probs", "map", "tokens per expert"

    monkeypatch.setattr(moe_utils, "topk_softmax_with_capacity", mindspeeds)
    assert topk(scaling_factor=2.0) == ("probs", "map")
    assert asked["scaling_factor"] == 2.0
