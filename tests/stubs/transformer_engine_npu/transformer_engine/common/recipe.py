"""FP8 recipes: Megatron-core makes one when a config asks for FP8, and hands it to `fp8_autocast`."""

from __future__ import annotations

import enum
from typing import Any


class Format(enum.Enum):
    E4M3 = "e4m3"


class Recipe:
    def __init__(self, **_: Any) -> None: ...


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...
