"""Flags, functions and methods of later Megatron-core releases, on the release on the path."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from npu_replay.compat.megatron import config_flags
from npu_replay.compat.megatron.config_flags import REPLAY

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


@pytest.fixture(params=["TransformerConfig", "MLATransformerConfig"])
def config_class(request: pytest.FixtureRequest) -> type:
    from megatron.core.transformer import transformer_config

    config_flags.install()  # another test may have called uninstall()
    return getattr(transformer_config, request.param)


@pytest.mark.parametrize(
    "flag",
    [
        pytest.param("moe_enable_routing_replay", marks=pytest.mark.capability("flag")),
        pytest.param("enable_routing_replay", marks=pytest.mark.capability("alias")),
    ],
)
def test_a_config_takes_the_flag_and_keeps_it(config_class: type, flag: str) -> None:
    off = config_class(**SIZES)
    on = config_class(**SIZES, **{flag: True})
    for name in REPLAY:
        assert (getattr(off, name), getattr(on, name)) == (False, True)
        assert getattr(copy.deepcopy(on), name) is True
    with pytest.raises(TypeError, match="unexpected keyword argument 'moe_replay_routing'"):
        config_class(**SIZES, moe_replay_routing=True)


@pytest.mark.capability("alias")
@pytest.mark.parametrize("flag", REPLAY)
def test_a_flag_that_is_set_on_a_built_config_counts(config_class: type, flag: str) -> None:
    config = copy.deepcopy(config_class(**SIZES))
    assert config_flags.asks_for_replay(config) is False
    setattr(config, flag, True)
    assert config_flags.asks_for_replay(config) is True
    stored = pickle.dumps(config)
    assert b"npu_replay.compat" not in stored, "it may be read where npu_replay isn't installed"
    assert config_flags.asks_for_replay(pickle.loads(stored)) is True


@pytest.mark.capability("fusion_flag")
def test_every_config_says_whether_its_router_is_fused(config_class: type) -> None:
    assert config_class(**SIZES).moe_router_fusion is False


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
