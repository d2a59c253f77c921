"""Import names on their first use: most processes need few of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
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


def names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports names on their first use.

    Its public names are those that its source imports as themselves, «from module import name as name», which
    is how type checkers know them. Those under TYPE_CHECKING alone are imported here.
    """
    spec: Any = sys.modules[package].__spec__
    # Not get_source, which the loader of `pytest -p npu_replay` lacks.
    tree = ast.parse(spec.loader.get_data(spec.origin))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {
        alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        vars(sys.modules[package])[name] = value
        return value

    return get, lambda: sorted(vars(sys.modules[package]).keys() | homes.keys()), sorted(homes)
