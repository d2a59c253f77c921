"""compat.config_flags: the flags of routing replay on Megatron's configs, without MindSpeed.

tests/on_mindspeed/test_orders.py asks the same where MindSpeed has its own wrapper there; tests/matrix, on
all releases, that a flag is taken and an unknown one isn't, and that uninstall() puts the constructors back.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_replay.compat.megatron import config_flags
from npu_replay.compat.megatron.config_flags import FLAGS, REPLAY
from npu_replay.compat.patching.patches import Patches
from npu_replay.errors import ReplayError

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@pytest.fixture(params=["TransformerConfig", "MLATransformerConfig"])
def config_class(request: pytest.FixtureRequest) -> type:
    from megatron.core.transformer import transformer_config

    config_flags.install()  # another test may have called uninstall()
    return getattr(transformer_config, request.param)


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


def fields_of(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(type(config))}


def by_fields(config: Any) -> Any:
    return type(config)(**fields_of(config))


def by_dict(config: Any) -> Any:
    return type(config)(**dataclasses.asdict(config))


def test_a_config_that_is_made_from_another_has_its_flags(config_class: type) -> None:
    config = config_class(**SIZES, enable_routing_replay=True)
    stored = pickle.dumps(config)
    assert b"npu_replay.compat" not in stored, "it may be read where npu_replay isn't installed"
    for made in (
        dataclasses.replace(copy.deepcopy(config)),
        dataclasses.replace(pickle.loads(stored)),
        dataclasses.replace(config, num_layers=3),
        by_fields(config),
    ):
        assert made.enable_routing_replay is True
    assert made.num_layers == 2
    for flag in REPLAY:
        made = dataclasses.replace(config, **{flag: False})
        assert [getattr(made, name) for name in REPLAY] == [False, False]
    fields = dataclasses.asdict(config)
    del config, made
    assert config_class(**fields).enable_routing_replay is True, "the config is gone"


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


@pytest.mark.choice
@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("making", [dataclasses.replace, by_fields, by_dict])
@pytest.mark.parametrize("names", [REPLAY, REPLAY[:1], REPLAY[1:]], ids=["both", *REPLAY])
@pytest.mark.parametrize("value", [True, False])
def test_a_config_that_is_made_from_a_copy_has_the_copys_flag(
    config_class: type, value: bool, names: tuple[str, ...], making: Any, copying: Any
) -> None:
    """And not the original's, which is alive: it was silently the other way round on 0.12 to 0.15."""
    config = config_class(**SIZES, enable_routing_replay=not value)
    twin = copying(config)
    for name in names:
        setattr(twin, name, value)
    assert [making(one).enable_routing_replay for one in (twin, config)] == [value, not value]


def test_fields_of_copies_that_differ_are_an_error_where_nobody_says_of_which(config_class: type) -> None:
    configs = [config_class(**SIZES)]
    configs.append(copy.deepcopy(configs[0]))
    configs[1].enable_routing_replay = True
    fields = dataclasses.asdict(configs[1])  # with an init_method of their own
    if REPLAY[1] in fields:
        configs[1].moe_enable_routing_replay = True
        for value in (True, False):  # the field of such a release says it
            fields[REPLAY[1]] = value
            assert config_class(**fields).enable_routing_replay is value
        return
    with pytest.raises(ReplayError, match=r"enable_routing_replay can't be told.*2 configs.*differ"):
        config_class(**fields)
    assert config_class(**fields, enable_routing_replay=True).enable_routing_replay is True
    configs[0].enable_routing_replay = True
    assert config_class(**fields).enable_routing_replay is True


def test_what_a_config_said_stays_with_its_fields(config_class: type) -> None:
    """Also where another config without replay was made from them since, and both are garbage."""
    fields = fields_of(config_class(**SIZES, enable_routing_replay=True))
    config_class(**fields | {"enable_routing_replay": False})
    assert config_class(**fields).enable_routing_replay is True


def test_a_deep_copy_is_known_by_its_own_init_method(config_class: type) -> None:
    """Also where the caller of the constructor holds the fields alone."""
    configs = [config_class(**SIZES)]
    configs.append(copy.deepcopy(configs[0]))
    assert configs[0].init_method is not configs[1].init_method
    configs[1].enable_routing_replay = True
    for number, fields in enumerate([fields_of(config) for config in configs]):
        assert config_class(**fields).enable_routing_replay is bool(number)


@pytest.mark.megatron
def test_one_flag_given_by_its_two_names_has_to_be_one_value(config_class: type) -> None:
    if REPLAY[1] in {field.name for field in dataclasses.fields(config_class)}:
        # There replace() passes the field by itself, so what a person said wins.
        config = config_class(**SIZES, enable_routing_replay=True, moe_enable_routing_replay=False)
        assert config.moe_enable_routing_replay is True
        with pytest.raises(ReplayError, match=r"two names of one flag.*or both alike, got"):
            config_class(**SIZES, enable_routing_replay=False, moe_enable_routing_replay=True)
        return
    with pytest.raises(ReplayError, match=r"two names of one flag.*or both alike, got"):
        config_class(**SIZES, enable_routing_replay=True, moe_enable_routing_replay=False)


def test_another_config_with_the_same_init_method_is_no_copy(config_class: type) -> None:
    def own(weight: object) -> None: ...

    config_class(**SIZES, init_method=own, enable_routing_replay=True)
    assert config_class(**SIZES, init_method=own).enable_routing_replay is False
    config = config_class(**SIZES, enable_routing_replay=True)
    assert config_class(**SIZES, init_method=config.init_method).enable_routing_replay is False


OTHERS = {
    "none": None,
    "unhashable": [],
    "shared": torch.nn.init.xavier_uniform_,
    "bound": torch.rand(1).add_,
}


@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
def test_a_subclass_that_finishes_itself_otherwise_is_built_as_ever(config_class: type, made: Any) -> None:
    class Deferred(config_class):  # type: ignore[valid-type, misc]
        def __post_init__(self) -> None:
            self.init_method = made

    if not hasattr(config_class, "moe_router_fusion"):  # a field of Megatron's can't be a property
        Deferred.moe_router_fusion = property(lambda self: False)

    for _ in range(2):
        deferred = Deferred(**SIZES, enable_routing_replay=True)
        assert deferred.enable_routing_replay is True
        assert deferred.init_method is made
    assert dataclasses.replace(deferred, enable_routing_replay=False).enable_routing_replay is False


def test_a_shim_that_fails_in_the_second_class_leaves_the_first_as_it_was(
    monkeypatch: pytest.MonkeyPatch, config_class: type
) -> None:
    first, second = type("TransformerConfig", (), {}), type("MLATransformerConfig", (), {"__init__": 7})
    before = dict(vars(first))
    patches = Patches("a test")
    monkeypatch.setattr(config_flags, "_patches", patches)
    module = SimpleNamespace(TransformerConfig=first, MLATransformerConfig=second)
    with pytest.raises(TypeError):
        config_flags._wrap(module)
    assert dict(vars(first)) == before
    assert not list(patches)


def test_a_subclass_with_a_field_of_its_own_keeps_it(config_class: type) -> None:
    @dataclasses.dataclass
    class Provider(config_class):  # type: ignore[valid-type, misc]
        enable_routing_replay: bool = False

    provider = Provider(**SIZES, enable_routing_replay=True)
    assert provider.enable_routing_replay is True
    assert dataclasses.replace(provider).enable_routing_replay is True
    assert "__init__" in vars(Provider)
