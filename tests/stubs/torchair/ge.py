"""Names for type hints, and operators that no graph is ever built of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tensor = TensorSpec = DataType = Any


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None
