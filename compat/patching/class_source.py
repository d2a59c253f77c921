"""Reads a class's method from its file, where it was replaced and the original wasn't kept."""

from __future__ import annotations

import importlib.util
import sys
from types import FunctionType
from typing import Any


def method(cls: type, name: str) -> FunctionType:
    """Return the function of that name from the class's source file, working on the class as it is.

    >>> import json
    >>> from npu_replay.compat.patching import class_source
    >>> class_source.method(json.JSONEncoder, "encode")
    <function JSONEncoder.encode at 0x...>

    The method may refer to names of its module, and not to super().
    """
    module: Any = sys.modules[cls.__module__]
    spec: Any = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    fresh = importlib.util.module_from_spec(spec)  # run a second time, outside sys.modules
    spec.loader.exec_module(fresh)
    function = vars(getattr(fresh, cls.__name__))[name]
    return FunctionType(function.__code__, vars(module), name, function.__defaults__)
