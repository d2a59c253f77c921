"""Attach hooks to modules for the length of a block; in a copy of the model they do nothing."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


def outside_modes() -> AbstractContextManager[None]:
    """Return a context in which no dispatch mode and no function mode sees our operations.

    A selective checkpoint or a user's mode counts operations, and ours run in a forward but not in its
    recompute.
    """
    if torch._C._len_torch_dispatch_stack():
        return _outside_dispatch()
    return torch._C.DisableTorchFunction()  # implemented in C++: half a µs


def restore_functions(handled: bool) -> None:
    """Switch torch's handling of functions on again, after an interrupt before a hook's end."""
    if handled and not torch._C._is_torch_function_enabled():
        never_entered = torch._C.DisableTorchFunction()  # its exit switches handling on
        never_entered.__exit__(None, None, None)


@contextlib.contextmanager
def _outside_dispatch() -> Any:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def caller_of_hook() -> FrameType | None:
    """Return the frame that called our innermost running hook; it lives until the module's call ends."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not Hook.__call__.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_back


class Hook:
    """Calls `act(owner, *at, args, last)` as a forward hook, or a pre-hook with keywords, of one module.

    `last` is the module's output, or a pre-hook's keywords; the result of `act` is the hook's. Module and
    owner are held weakly: a hook without its owner does nothing, and a copy of the model keeps nothing alive.
    A shallow copy of the module shares its hooks, which ignore it. In a deep copy or a pickle the hook
    becomes a function that does nothing.
    """

    __slots__ = ("__weakref__", "_act", "_at", "_module", "_owner")

    def __init__(self, owner: object, act: Callable[..., Any], module: nn.Module, *at: Any) -> None:
        self._owner = weakref.ref(owner)
        self._act = act
        self._module = weakref.ref(module)
        self._at = at

    def __call__(self, module: nn.Module, args: tuple[Any, ...], last: Any) -> Any:
        owner = self._owner()
        if owner is None or module is not self._module():
            return None
        with outside_modes():
            return self._act(owner, *self._at, args, last)

    def take_off(self) -> None:
        """Remove the hook from its module, also where it isn't attached yet."""
        module = self._module()
        for name in ("_forward_pre_hooks", "_forward_hooks") if module is not None else ():
            hooks = vars(module)[name]
            for key in [key for key, hook in hooks.items() if hook is self]:
                for kind in ("with_kwargs", "always_called"):
                    vars(module).get(f"{name}_{kind}", {}).pop(key, None)
                del hooks[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to a built-in that takes any arguments: loading the pickle then needs no npu_replay."""
        return getattr, (contextlib.nullcontext, "__exit__")
