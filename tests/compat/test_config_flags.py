"""compat.config_flags: the flags of routing replay on Megatron's configs, without MindSpeed.

tests/on_mindspeed/test_config_flags.py asks the same where MindSpeed has its own wrapper there.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest

from npu_replay.compat import config_flags
from npu_replay.compat.config_flags import FLAGS, REPLAY

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@pytest.fixture(params=["TransformerConfig", "MLATransformerConfig"])
def config_class(request: pytest.FixtureRequest) -> type:
    from megatron.core.transformer import transformer_config

    config_flags.install()  # another test may have called uninstall()
    return getattr(transformer_config, request.param)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_release_takes_the_flag_and_keeps_it_on_the_instance(config_class: type, flag: str) -> None:
    """T5: subclasses that are dataclasses of their own took no new argument."""
    config = config_class(**SIZES, **{flag: True})
    assert vars(config)[flag] is True
    other = config_class(**SIZES)
    assert [getattr(other, name) for name in FLAGS] == [False] * len(FLAGS)


@pytest.mark.parametrize("flag", REPLAY)
def test_both_names_of_the_flag_mean_the_same(config_class: type, flag: str) -> None:
    """T6: the wrong one of the two was taken by no one, in silence."""
    config = config_class(**SIZES, **{flag: True})
    assert [getattr(config, name) for name in REPLAY] == [True, True]


def test_nothing_is_written_on_the_class(config_class: type) -> None:
    """A class attribute makes MindSpeed drop the argument, a signature of ours makes it pass it on."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    for name in set(FLAGS) - fields:
        assert not hasattr(config_class, name)
    assert set(inspect.signature(config_class).parameters) == {
        field.name for field in dataclasses.fields(config_class) if field.init
    }
    assert "__signature__" not in vars(config_class.__init__)


MADE_FROM = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": lambda config: dataclasses.replace(config, num_layers=3),
    "its own class": lambda config: type(config)(**SIZES, init_method=config.init_method),
    "its fields": lambda config: type(config)(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(type(config))}
    ),
}


@pytest.mark.parametrize("way", MADE_FROM)
def test_a_config_that_is_made_from_another_has_its_flags(config_class: type, way: str) -> None:
    config = config_class(**SIZES, enable_routing_replay=True)
    made = MADE_FROM[way](config)
    assert made is not config
    assert made.enable_routing_replay is True
    assert made.num_layers == (3 if way == "replace" else 2)


def test_a_flag_set_after_construction_is_taken_along(config_class: type) -> None:
    """As verl does, whose subclasses reject the argument."""
    config = config_class(**SIZES)
    config.enable_routing_replay = True
    assert dataclasses.replace(config).enable_routing_replay is True


def test_a_flag_that_is_given_is_not_overruled(config_class: type) -> None:
    config = config_class(**SIZES, moe_router_fusion=True)
    made = config_class(**SIZES, init_method=config.init_method, moe_router_fusion=False)
    assert made.moe_router_fusion is False


def test_configs_of_one_users_own_init_method_know_nothing_of_each_other(config_class: type) -> None:
    def own(weight: object) -> None: ...

    config_class(**SIZES, init_method=own, enable_routing_replay=True)
    assert config_class(**SIZES, init_method=own).enable_routing_replay is False


def test_a_subclass_with_a_field_of_its_own_keeps_it(config_class: type) -> None:
    @dataclasses.dataclass
    class Provider(config_class):  # type: ignore[valid-type, misc]
        enable_routing_replay: bool = False

    provider = Provider(**SIZES, enable_routing_replay=True)
    assert provider.enable_routing_replay is True
    assert dataclasses.replace(provider).enable_routing_replay is True
    assert "__init__" in vars(Provider)


def test_other_unknown_arguments_are_still_errors(config_class: type) -> None:
    with pytest.raises(TypeError, match="enable_routing_reply"):
        config_class(**SIZES, enable_routing_reply=True)


UNDONE = """
import sys
first, then = sys.argv[1:]
modules = {"npu_replay": "npu_replay", "megatron": "megatron.core.transformer.transformer_config"}
for name in (first, then):
    __import__(modules[name])
import npu_replay
from megatron.core.transformer.transformer_config import TransformerConfig as Config
ours = vars(Config)["__init__"]
assert "TransformerConfig.__init__" in str(npu_replay.report()), npu_replay.report()
sizes = dict(num_layers=1, hidden_size=8, num_attention_heads=2)
assert Config(**sizes, enable_routing_replay=True).enable_routing_replay
npu_replay.uninstall()
assert vars(Config)["__init__"] is ours.__wrapped__
assert "TransformerConfig.__init__" not in str(npu_replay.report())
try:
    Config(**sizes, enable_routing_replay=True)
except TypeError:
    print("undone")
"""


@pytest.mark.parametrize("order", [("npu_replay", "megatron"), ("megatron", "npu_replay")])
def test_whichever_is_imported_first_uninstall_undoes_it(order: tuple[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", UNDONE, *order], capture_output=True, text=True, check=False)
    assert done.stdout == "undone\n", done.stderr
