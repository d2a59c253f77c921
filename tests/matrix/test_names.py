"""Flags, functions and methods of later Megatron-core releases, on the release on the path."""

from __future__ import annotations

import copy
import dataclasses
from importlib import import_module
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


def config(kind: str, **flags: Any) -> Any:
    return getattr(import_module("megatron.core.transformer.transformer_config"), kind)(**SIZES, **flags)


@pytest.mark.parametrize("kind", ["TransformerConfig", "MLATransformerConfig"])
@pytest.mark.parametrize(
    "flag",
    [
        pytest.param("moe_enable_routing_replay", marks=pytest.mark.capability("flag")),
        pytest.param("enable_routing_replay", marks=pytest.mark.capability("alias")),
    ],
)
def test_a_config_takes_the_flag_and_keeps_it(kind: str, flag: str) -> None:
    off = config(kind)
    on = config(kind, **{flag: True})
    for name in ("moe_enable_routing_replay", "enable_routing_replay"):
        assert (getattr(off, name), getattr(on, name)) == (False, True)
        with pytest.raises(TypeError, match="unexpected keyword argument 'moe_replay_routing'"):
            config(kind, moe_replay_routing=True)
        assert getattr(copy.deepcopy(on), name) is True
        assert getattr(dataclasses.replace(on, hidden_size=64), name) is True
        assert getattr(dataclasses.replace(on, **{flag: False}), name) is False


@pytest.mark.capability("fusion_flag")
@pytest.mark.parametrize("kind", ["TransformerConfig", "MLATransformerConfig"])
def test_every_config_says_whether_its_router_is_fused(kind: str) -> None:
    assert config(kind).moe_router_fusion is False


@pytest.mark.capability("vp_stages")
def test_the_first_and_the_last_virtual_stage() -> None:
    from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage

    assert [is_vp_first_stage(stage, 3) for stage in range(3)] == [True, False, False]
    assert [is_vp_last_stage(stage, 3) for stage in range(3)] == [False, False, True]
    for stage, size in ((None, None), (0, None), (None, 1), (0, 1)):
        assert is_vp_first_stage(stage, size) is is_vp_last_stage(stage, size) is True
    for ask in (is_vp_first_stage, is_vp_last_stage):
        with pytest.raises(AssertionError, match="vp_stage=1"):
            ask(1, None)
