"""Import names on their first use: most processes need few of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(where: str) -> Callable[..., Any]:
    """Return a stand-in for «package.module:name», a function or class, which is imported when first called.

    >>> lazy("math:sqrt")(9)
    3.0
    """
    module, _, name = where.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


def names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports its names on their first use.

    Args:
        package: its `__name__`.
        homes: the module of each name, relative to the package; a name that maps to itself is a module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        if homes[name] == name:
            return module
        value = vars(sys.modules[package])[name] = getattr(module, name)
        return value

    return get, lambda: sorted(vars(sys.modules[package]).keys() | homes.keys())
