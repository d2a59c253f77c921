"""The config under MindSpeed: a dataclass of its own for each instance, filled from the global arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import wraps
from typing import Any

from mindspeed.args_utils import get_full_args
from mindspeed.branch import BRANCH
from mindspeed.features_manager import MindSpeedFeaturesManager


def transformer_config_post_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    """Every feature's checks of a config, around Megatron's own."""

    @wraps(fn)
    def wrapper(self: Any) -> None:
        MindSpeedFeaturesManager.pre_validate_features_args(self)
        fn(self)
        MindSpeedFeaturesManager.validate_features_args(args=self)

    return wrapper


def transformer_config_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    """What the class's signature knows goes to its __init__; the rest becomes attributes of the instance.

    An attribute that is there already, the class's for instance, wins over the caller's argument.
    """

    @wraps(fn)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**vars(get_full_args()), **kwargs}
        parameters = inspect.signature(self.__class__).parameters
        known = {name: value for name, value in given.items() if name in parameters and _passes(name, value)}
        new = {name: value for name, value in given.items() if name not in parameters}
        new = {name: value for name, value in new.items() if not hasattr(self, name)}
        fields = [(name, type(value), field(init=False)) for name, value in new.items()]
        self.__class__ = make_dataclass(self.__class__.__name__, fields=fields, bases=(self.__class__,))
        for name, value in new.items():
            setattr(self, name, value)
        fn(self, *args, **known)

    return wrapper


def _passes(name: str, value: Any) -> bool:
    return value is not None or name not in BRANCH.ignored


def transformer_config_init_subclass(cls: type, **kwargs: Any) -> None:
    """Newer branches: a subclass that is defined after this gets the arguments as fields with defaults."""
    given = {**vars(get_full_args()), **kwargs}
    parameters = inspect.signature(cls).parameters
    for name, value in given.items():
        if name not in parameters and not hasattr(cls, name):
            cls.__annotations__[name] = type(value)
            setattr(cls, name, _default(value))


def _default(value: Any) -> Any:
    if type(value) in (list, dict, set, bytearray):
        return field(default_factory=lambda: value)
    return value
