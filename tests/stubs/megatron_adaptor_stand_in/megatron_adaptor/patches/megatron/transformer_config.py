"""The config under MegatronAdaptor: a dataclass of its own for each instance, filled from its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import wraps
from typing import Any

from megatron_adaptor.utils.args_utils import get_full_args


def transformer_config_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    """Pass what the class's signature knows to its __init__, and make attributes of the rest.

    An attribute that is there already, the class's for instance, wins over the caller's argument.
    """

    @wraps(fn)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        values = {**vars(get_full_args()), **kwargs}
        parameters = inspect.signature(self.__class__).parameters
        known = {name: value for name, value in values.items() if name in parameters}
        new = {
            name: value
            for name, value in values.items()
            if name not in parameters and not hasattr(self, name)
        }
        fields = [(name, type(value), field(init=False)) for name, value in new.items()]
        self.__class__ = make_dataclass(self.__class__.__name__, fields=fields, bases=(self.__class__,))
        for name, value in new.items():
            setattr(self, name, value)
        fn(self, *args, **known)

    return wrapper
