"""Reads a class's method from its file, where it was replaced and the original wasn't kept."""

from __future__ import annotations

import importlib.util
import sys
from types import CellType, FunctionType


def method(cls: type, name: str) -> FunctionType:
    """Return the function of that name from the class's source file, working on the class as it is.

    >>> import json
    >>> from npu_replay.compat.patching import class_source
    >>> class_source.method(json.JSONEncoder, "encode")
    <function JSONEncoder.encode at 0x...>

    Raises:
        LookupError: the module has no source file, or the class in it no such method.
    """
    module = sys.modules[cls.__module__]
    origin = getattr(module.__spec__, "origin", None)
    spec = importlib.util.spec_from_file_location(module.__name__, origin) if origin else None
    if spec is None or spec.loader is None:
        raise LookupError(f"{module.__name__} has no source file")
    fresh = importlib.util.module_from_spec(spec)  # run a second time, outside sys.modules
    spec.loader.exec_module(fresh)
    function = vars(getattr(fresh, cls.__name__)).get(name)
    if not isinstance(function, FunctionType):
        raise LookupError(f"no method {name} in the source of {cls.__module__}.{cls.__qualname__}")
    # The second module has a class of its own: super() in the method has to mean the given one.
    cells = tuple(
        CellType(cls) if free == "__class__" else cell
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    whole = FunctionType(function.__code__, vars(module), name, function.__defaults__, cells)
    whole.__kwdefaults__ = function.__kwdefaults__
    whole.__dict__.update(vars(function))
    whole.__doc__ = function.__doc__
    whole.__qualname__ = f"{cls.__qualname__}.{name}"
    return whole
