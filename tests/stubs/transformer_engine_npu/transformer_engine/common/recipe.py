"""FP8 recipes: Megatron-core makes one when a config asks for FP8, and hands it to `fp8_autocast`."""

from __future__ import annotations

import enum
from typing import Any


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...
