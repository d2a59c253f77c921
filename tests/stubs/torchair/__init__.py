"""A stub of torchair, the graph compiler: MindSpeed registers converters with it when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair import ge

__all__ = ["ge", "register_fx_node_ge_converter"]


def register_fx_node_ge_converter(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function
