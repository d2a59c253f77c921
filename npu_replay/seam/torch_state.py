"""Change what is torch's own, and undo it: modules' hooks and forwards, modes, compilers' tables, the stance.

Compilers keep tables of torch's functions. The first torch.compile of a process makes dynamo's: made while
torch's top-k is replaced, it would lack the real one, and code compiled later would break its graph there, or
fail with fullgraph=True. So such a table is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from npu_replay.module_tree import way

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class Hook:
    """Calls `act(owner, *at, args, last)` as a forward hook, or a pre-hook with keywords, of one module.

    `last` is the module's output, or a pre-hook's keywords; the result of `act` is the hook's. Module and
    owner are held weakly: a hook without its owner does nothing, and a copy of the model keeps nothing alive.
    A shallow copy of the module shares its hooks, which ignore it. In a deep copy or a pickle the hook
    becomes a function that does nothing.
    """

    __slots__ = ("__weakref__", "_act", "_at", "_module", "owner")

    def __init__(self, owner: object, act: Callable[..., Any], module: nn.Module, *at: Any) -> None:
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self._module = weakref.ref(module)
        self._act = act
        self._at = at

    def __call__(self, module: nn.Module, args: tuple[Any, ...], last: Any) -> Any:
        owner = self.owner()
        if owner is None or module is not self._module():
            return None
        transformed = torch._C._functorch.maybe_current_level() is not None
        if not (transformed or function_modes() or dispatch_modes()):
            return self._act(owner, *self._at, args, last)
        # A transform (torch.func) wraps what we make, and a wrapper has no memory that could be read.
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with outside_modes(), temporarily_clear_interpreter_stack():
            return self._act(owner, *self._at, args, last)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to a built-in that takes any arguments: loading the pickle then needs no npu_replay."""
        return getattr, (contextlib.nullcontext, "__exit__")


class ForwardInPlace:
    """Takes the place of a module's `forward`. A deep copy or a pickle of the module has its class's.

    A shallow copy of the module shares it, and so runs the module itself.

    Attributes:
        native: the forward whose place it takes, bound to the module.
        is_on: it was put on, and not taken off.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_on = False
        self._own: Any = vars(module).get("forward")  # what the module has beside its class's
        self.native: Callable[..., Any] = module.forward
        self.__wrapped__ = self.native  # for `inspect.signature`

    def put_on(self) -> None:
        self.is_on = True
        vars(self.module)["forward"] = self

    def take_off(self) -> None:
        """Leave the module's place, unless somebody has wrapped this, which then passes all calls on."""
        self.is_on = False
        if vars(self.module).get("forward") is not self:
            return
        if self._own is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return functools.partial(_forward_of_class, memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        # Looked up when a pickle is loaded: the module has its class's forward then, and needs no npu_replay.
        holder = self.module if self._own is None else SimpleNamespace(forward=self._own)
        return getattr, (holder, "forward")


def method_of_class(module: object, name: str) -> Any:
    """Return a method of a module's class, unbound.

    It is taken from the classes' dictionaries, since some wrappers on a class bind at each access.
    """
    return next(vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind))


def _forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return method_of_class(module, "forward").__get__(module, type(module))(*args, **kwargs)


def outside_modes() -> AbstractContextManager[None]:
    """Return a context in which no dispatch mode and no function mode sees our operations.

    A selective checkpoint or a user's mode counts operations, and ours run in a forward but not in its
    recompute.
    """
    if torch._C._len_torch_dispatch_stack():
        return _outside_dispatch()
    return torch._C.DisableTorchFunction()  # implemented in C++: half a µs


@contextlib.contextmanager
def _outside_dispatch() -> Any:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's data, under the wrappers of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.data_ptr()


def dynamo_knows() -> bool:
    """Return whether dynamo has its table of torch's functions."""
    table = _dynamo_table()
    return table is not None and bool(table.cache_info().currsize)


def dynamo_forgets() -> None:
    """Drop dynamo's table, if there is one; dynamo makes another when it needs it."""
    if (table := _dynamo_table()) is not None:
        table.cache_clear()


def _dynamo_table() -> Any:
    rules = sys.modules.get("torch._dynamo.trace_rules")  # never imported by us: that takes seconds
    table = getattr(rules, "get_torch_obj_rule_map", None)
    return table if hasattr(table, "cache_clear") and hasattr(table, "cache_info") else None


_holders: set[object] = set()
_stances: list[Any] = []
"""Holds the context that restores the stance, while it is ours."""


def hold_eager(chunks: Sequence[nn.Module], paths: Sequence[Sequence[str]], holder: object) -> None:
    """Run modules that contain a router, by its path, eagerly until `let_go(holder)`.

    A compiled graph skips hooks that come later. Nothing is done where none of them is compiled: the stance
    is the whole process's, and functions that a framework compiled for itself should stay so.
    """
    ways = (way(chunk, path) for chunk, inside in zip(chunks, paths, strict=True) for path in inside)
    if any(is_compiled(module) for modules in ways for module in modules):
        _holders.add(holder)
        if not _stances:
            _stances.append(torch.compiler.set_stance("force_eager"))


def let_go(holder: object) -> None:
    """Release a holder. The last one restores the stance."""
    _holders.discard(holder)
    if not _holders and _stances:
        _stances[0].__exit__(None, None, None)
        _stances.clear()


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled: by `module.compile()`, `torch.compile(module)` or its forward."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )
