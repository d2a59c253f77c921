"""What both products put in the place of torch's and Megatron's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import wraps
from typing import Any

import torch

from ascend_contract.features import FeaturesManager

_CONFIG = "megatron.core.transformer.transformer_config"


def dummy_compile(*args: Any, **kwargs: Any) -> Any:
    """torch.compile and torch.jit.script: a bare call of the function, without its name and signature."""

    def bare(fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*fn_args, **fn_kwargs):
            return fn(*fn_args, **fn_kwargs)

        return wrapper

    return bare(args[0]) if args and callable(args[0]) else bare


def contiguous_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.Tensor.view: what isn't contiguous is copied first, so the result is no view of it."""

    @wraps(fn)
    def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return fn(tensor if tensor.is_contiguous() else tensor.contiguous(), *args, **kwargs)

    return wrapper


def all_reduce_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.distributed.all_reduce: a float64 tensor is reduced as a float32 copy that nobody sees again."""

    @wraps(fn)
    def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype != torch.double:
            return fn(tensor, *args, **kwargs)
        handle = fn(tensor.float(), *args, **kwargs)
        return None if handle is None else handle.wait()

    return wrapper


OF_TORCH = {
    "torch.compile": dummy_compile,
    "torch.jit.script": dummy_compile,
    "torch.Tensor.view": contiguous_wrapper,
    "torch.distributed.all_reduce": all_reduce_wrapper,
}


def of_config(full_args: Callable[[], Any], features: type[FeaturesManager]) -> dict[str, Any]:
    """Return the wrappers of the config: the reason why an unknown argument is no error there."""

    def init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
        """What the class's signature knows goes to its __init__; the rest becomes the instance's attributes.

        An attribute that is there already, the class's for instance, wins over the caller's argument.
        """

        @wraps(fn)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            arguments = {**vars(full_args()), **kwargs}
            parameters = inspect.signature(self.__class__).parameters
            known = {name: value for name, value in arguments.items() if name in parameters}
            new = {
                name: value
                for name, value in arguments.items()
                if name not in known and not hasattr(self, name)
            }
            fields = [(name, type(value), field(init=False)) for name, value in new.items()]
            self.__class__ = make_dataclass(self.__class__.__name__, fields=fields, bases=(self.__class__,))
            for name, value in new.items():
                setattr(self, name, value)
            fn(self, *args, **known)

        return wrapper

    def post_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
        @wraps(fn)
        def wrapper(self: Any) -> None:
            features.pre_validate_features_args(self)
            fn(self)

        return wrapper

    return {
        f"{_CONFIG}.TransformerConfig.__init__": init_wrapper,
        f"{_CONFIG}.MLATransformerConfig.__init__": init_wrapper,
        f"{_CONFIG}.TransformerConfig.__post_init__": post_init_wrapper,
    }
