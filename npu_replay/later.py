"""A function that is named now, and imported when it is first called.

What `import npu_replay` announces (shims, router kinds, readers) is written so: most processes need few of
them, and all together take longer to import than everything else of npu_replay.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def later(where: str) -> Callable[..., Any]:
    """A function or class of a module that need not be imported yet.

    Args:
        where: «package.module:name».

    Two threads that call it first at the same moment are no danger: Python imports a module once, under a
    lock of its own.
    """
    module, _, name = where.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
