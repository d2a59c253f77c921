"""A stub of triton: every submodule can be imported and every kernel defined, and none can run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "3.2.0"


class Kernel:
    """What `@triton.jit` makes of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        name = getattr(self.fn, "__name__", self.fn)
        raise RuntimeError(f"triton stub: the kernel {name} was called on a machine without an accelerator")


def jit(*args: Any, **_: Any) -> Any:
    """`@jit` and `@jit(...)`."""
    return Kernel(args[0]) if args else Kernel


class _Name:
    """Any name of any submodule."""

    def __getattr__(self, name: str) -> _Name:
        return _Name()

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else _Name()

    def __getitem__(self, key: object) -> _Name:
        return _Name()


class _Submodules(MetaPathFinder, Loader):
    """triton.language, triton.runtime.driver, ..."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__["__getattr__"] = _any_name
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == f"{__name__}.language":
            module.__dict__["constexpr"] = int


def _any_name(name: str) -> _Name:
    if name.startswith("__") or name in _OF_A_DEVICE:
        raise AttributeError(name)
    return _Name()


_OF_A_DEVICE = ("driver", "active")
"""What is asked which device there is: MindSpeed takes the CPU when that raises."""

__getattr__ = _any_name
sys.meta_path.insert(0, _Submodules())
