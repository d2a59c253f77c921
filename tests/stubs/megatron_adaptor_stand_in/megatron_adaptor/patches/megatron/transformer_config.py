"""The config under MegatronAdaptor: a dataclass of its own for each instance, filled from the arguments.

MindSpeed's wrapper of the same constructor does the same, and may lie over this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import wraps
from typing import Any

from megatron_adaptor.features_manager.features_manager import FeaturesManager
from megatron_adaptor.utils.args_utils import get_full_args


def transformer_config_post_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    """Every feature's checks of a config, around Megatron's own."""

    @wraps(fn)
    def wrapper(self: Any) -> None:
        FeaturesManager.pre_validate_features_args(self)
        fn(self)
        FeaturesManager.post_validate_features_args(self)
        FeaturesManager.validate_features_args(self)

    return wrapper


def transformer_config_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    """What the class's signature knows goes to its __init__; the rest becomes attributes of the instance.

    An attribute that is there already, the class's for instance, wins over the caller's argument.
    """

    @wraps(fn)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**vars(get_full_args()), **kwargs}
        parameters = inspect.signature(self.__class__).parameters
        known = {name: value for name, value in given.items() if name in parameters}
        new = {name: value for name, value in given.items() if name not in known and not hasattr(self, name)}
        fields = [(name, type(value), field(init=False)) for name, value in new.items()]
        self.__class__ = make_dataclass(self.__class__.__name__, fields=fields, bases=(self.__class__,))
        for name, value in new.items():
            setattr(self, name, value)
        fn(self, *args, **known)

    return wrapper
