"""The arguments of the process, once somebody has set them."""

from __future__ import annotations

from typing import Any

_GLOBAL_ARGS: Any = None


def get_args() -> Any:
    """The arguments.

    Raises:
        AssertionError: if nobody has set them; MindSpeed reads its text.
    """
    if _GLOBAL_ARGS is None:
        raise AssertionError("args is not initialized.")
    return _GLOBAL_ARGS


def set_args(args: Any) -> None:
    """Set them."""
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args
