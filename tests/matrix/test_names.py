"""Flags, functions and methods of later Megatron-core releases, on the release on the path."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from npu_replay.compat.megatron import config_flags
from npu_replay.compat.megatron.config_flags import REPLAY
from npu_replay.errors import ReplayError

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
        assert getattr(dataclasses.replace(on, hidden_size=64), name) is True
        assert getattr(dataclasses.replace(on, **{flag: False}), name) is False
    with pytest.raises(TypeError, match="unexpected keyword argument 'moe_replay_routing'"):
        config_class(**SIZES, moe_replay_routing=True)


@pytest.mark.capability("alias")
def test_a_config_that_is_made_from_another_has_the_flags_that_it_was_built_with(config_class: type) -> None:
    config = config_class(**SIZES, enable_routing_replay=True)
    stored = pickle.dumps(config)
    assert b"npu_replay.compat" not in stored, "it may be read where npu_replay isn't installed"
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config_class)}
    for made in (
        dataclasses.replace(copy.deepcopy(config)),
        dataclasses.replace(pickle.loads(stored)),
        dataclasses.replace(config, num_layers=3),
        config_class(**fields),
        config_class(**dataclasses.asdict(config)),
    ):
        assert made.enable_routing_replay is True
    off = dataclasses.replace(config, enable_routing_replay=False)
    assert dataclasses.replace(off).enable_routing_replay is False


@pytest.mark.capability("alias")
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("flag", REPLAY)
def test_the_name_that_was_set_since_counts(config_class: type, flag: str, value: bool) -> None:
    """A reference model has the actor's config with the flag off, and its routers must not be replayed."""
    config = copy.deepcopy(config_class(**SIZES, enable_routing_replay=not value))
    assert config_flags.asks_for_replay(config) is not value
    setattr(config, flag, value)
    assert config_flags.asks_for_replay(config) is value
    assert config_flags.asks_for_replay(pickle.loads(pickle.dumps(config))) is value
    setattr(config, flag, not value)
    assert config_flags.asks_for_replay(config) is not value


@pytest.mark.capability("alias")
def test_one_flag_given_by_its_two_names_has_to_be_one_value(config_class: type) -> None:
    is_field = REPLAY[1] in {field.name for field in dataclasses.fields(config_class)}
    if is_field:  # replace() passes the field by itself, so what a person said wins
        config = config_class(**SIZES, enable_routing_replay=True, moe_enable_routing_replay=False)
        assert config.moe_enable_routing_replay is True
    with pytest.raises(ReplayError, match=r"two names of one flag.*or both alike, got"):
        config_class(**SIZES, enable_routing_replay=not is_field, moe_enable_routing_replay=is_field)


@pytest.mark.capability("alias")
def test_another_config_with_the_same_init_method_is_no_copy(config_class: type) -> None:
    def own(weight: object) -> None: ...

    config_class(**SIZES, init_method=own, enable_routing_replay=True)
    assert config_class(**SIZES, init_method=own).enable_routing_replay is False
    config = config_class(**SIZES, enable_routing_replay=True)
    assert config_class(**SIZES, init_method=config.init_method).enable_routing_replay is False


@pytest.mark.capability("fusion_flag")
def test_every_config_says_whether_its_router_is_fused(config_class: type) -> None:
    assert config_class(**SIZES).moe_router_fusion is False
