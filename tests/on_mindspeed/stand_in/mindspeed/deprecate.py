"""What runs by itself at import, and `with NoExecuteFunction():`, which keeps it from doing so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class AutoExecuteFunction:
    """A function that does nothing while AUTO_EXECUTE is off."""

    AUTO_EXECUTE: ClassVar[bool] = True

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*args, **kwargs) if AutoExecuteFunction.AUTO_EXECUTE else None


class NoExecuteFunction:
    """Turns AutoExecuteFunction off for a block."""

    def __enter__(self) -> None:
        AutoExecuteFunction.AUTO_EXECUTE = False

    def __exit__(self, *_: object) -> None:
        AutoExecuteFunction.AUTO_EXECUTE = True
