"""The arguments of the process, once somebody has set them."""

from __future__ import annotations

from typing import Any

_GLOBAL_ARGS: Any = None
_GLOBAL_TIMERS: Any = None


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


def get_timers() -> Any:
    """The timers."""
    if _GLOBAL_TIMERS is None:
        raise AssertionError("timers is not initialized.")
    return _GLOBAL_TIMERS


def unset_global_variables() -> None:
    """Forget them."""
    global _GLOBAL_ARGS, _GLOBAL_TIMERS
    _GLOBAL_ARGS = _GLOBAL_TIMERS = None


def destroy_global_vars() -> None:
    """Forget them."""
    unset_global_variables()
