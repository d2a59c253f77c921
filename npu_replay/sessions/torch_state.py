"""Change process-wide state of torch while a block is open, and undo it.

- torch's two names for top-k are replaced (`Guard`).
- Compilers keep tables of torch's functions. The first torch.compile of a process makes dynamo's: made inside
  a block, it would lack the real top-k, and code compiled later would break its graph there, or fail with
  fullgraph=True. So such a table is dropped. TorchScript's, by id, can't compile our function: there ours
  stands for the operator while the block is open.
- A compiled graph skips hooks that come later, so modules with a router run eagerly (`hold_eager`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from npu_replay.errors import RouterError
from npu_replay.routers import Router


class _Guarded:
    """Replaces one of torch's two names for top-k by a function that asks the thread's armed call, if any."""

    def __init__(self, owner: Any, guard: Guard) -> None:
        self.owner = owner
        self.own_attribute = "topk" in vars(owner)  # Tensor's is inherited from its C base
        self.native = native = owner.topk
        self.is_laid = False
        here = guard.here

        def topk(*args: Any, **kwargs: Any) -> Any:
            call = here.armed
            if call is None:
                if not guard.is_open:  # a wrapper from inside the block has restored ours after it
                    self.lay_back()
                return native(*args, **kwargs)
            if not call.matches(args, kwargs):
                return native(*args, **kwargs)
            return call.answer(native, args, kwargs, "guard")

        topk.__doc__ = native.__doc__
        self.answered = topk

    def lay_back(self) -> None:
        """Restore the name. If it was wrapped meanwhile, ours stays below and passes all calls on."""
        if self.owner.topk is not self.answered:
            return
        if self.own_attribute:
            self.owner.topk = self.native
        else:
            del self.owner.topk


class Guard:
    """Replaces torch's two names for top-k while at least one block is open.

    It takes no lock, which an interrupt could leave locked: each step may run twice, from any thread. The
    `armed` of `here` is this thread's call that answers the next top-k that it `matches`, or None.
    """

    def __init__(self, here: Any) -> None:
        self.here = here
        self._holders: set[object] = set()
        self._dynamo_knew = False
        self._names: list[_Guarded] = []
        self.is_open = False

    def install(self, holder: object) -> None:
        """Replace the names for a holder, until `remove` is called with it; each may be called repeatedly."""
        self._holders.add(holder)
        if not self.is_open:
            for left in self._names:
                left.lay_back()
            self._dynamo_knew = dynamo_knows()
            self._names = [_Guarded(torch, self), _Guarded(torch.Tensor, self)]
            if (operators := _script_table()) is not None:
                operators[id(self._names[0].answered)] = "aten::topk"
            self.is_open = True
        for name in self._names:
            if not name.is_laid:
                name.owner.topk, name.is_laid = name.answered, True

    def remove(self, holder: object) -> None:
        """Release a holder. The last one restores the names."""
        self._holders.discard(holder)
        if self._holders or not self.is_open:
            return
        for name in self._names:
            name.lay_back()
        if (operators := _script_table()) is not None:  # if made meanwhile, it lacks torch's own
            operators.pop(id(self._names[0].answered), None)
            operators[id(self._names[0].native)] = "aten::topk"
        if not self._dynamo_knew:
            dynamo_forgets()
        self.is_open = False
        if self._holders:  # another thread installed in between
            self.install(self)
            self._holders.discard(self)


def dynamo_knows() -> bool:
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


def _script_table() -> dict[int, str] | None:
    return getattr(sys.modules.get("torch.jit._builtins"), "_builtin_table", None)


def hold_eager(chunks: Sequence[nn.Module], routers: Sequence[Sequence[Router]], holder: object) -> None:
    """Run modules that contain a router eagerly, until `let_go(holder)`; RouterError before torch 2.6.

    Does nothing where none of them is compiled: the stance is the whole process's, and functions that a
    framework compiled for itself should stay so.
    """
    compiled = [
        path
        for chunk, found in zip(chunks, routers, strict=True)
        for path, module in chunk.named_modules()
        if is_compiled(module)
        and any(path in ("", router.path) or router.path.startswith(f"{path}.") for router in found)
    ]
    if not compiled:
        return
    if not hasattr(torch.compiler, "set_stance"):
        problem = "a compiled module contains a router, and its graph would skip the hooks"
        expected, got = "torch 2.6 or newer, which can run it eagerly meanwhile", f"torch {torch.__version__}"
        cause = "torch.compile on the model or a layer; compile the attention and the experts instead"
        where = compiled[0] or "the module itself"
        raise RouterError(problem, where=where, expected=expected, got=got, cause=cause)
    _holders.add(holder)
    if not _stances:
        _stances.append(torch.compiler.set_stance("force_eager"))


def let_go(holder: object) -> None:
    _holders.discard(holder)
    if not _holders and _stances:
        _stances[0].__exit__(None, None, None)
        _stances.clear()


_holders: set[object] = set()
_stances: list[Any] = []
"""Holds the context that restores the stance, while it is ours."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled: by `module.compile()`, `torch.compile(module)` or its forward."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )
