"""FP8 as far as Megatron-core asks: it can be switched on, and nothing is quantized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class FP8GlobalStateManager:
    _enabled = False
    _recipe: Any = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls._enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls._recipe

    @classmethod
    @contextlib.contextmanager
    def switched(cls, enabled: bool, recipe: Any) -> Iterator[None]:
        before = (cls._enabled, cls._recipe)
        cls._enabled = enabled
        cls._recipe = recipe
        try:
            yield
        finally:
            (cls._enabled, cls._recipe) = before


def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Any:
    return FP8GlobalStateManager.switched(enabled, fp8_recipe)


def fp8_model_init(enabled: bool = True, recipe: Any = None, **_: Any) -> Any:
    return contextlib.nullcontext()
