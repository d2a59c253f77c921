"""Tells whether a forward is a recompute inside backward, and of which forward.

This rests on three private facts of torch, which `probe()` checks once in each process:

- `_current_graph_task_id() != -1` exactly while autograd runs backward, on any thread. Grad mode doesn't
  show it: a reentrant checkpoint's first pass runs under no_grad, too.
- What may run a forward again encloses it: the node of a custom autograd Function (a reentrant checkpoint),
  or the region of a non-reentrant one. It lives as long as it may, and is on the Python stack while it does.
- Each thread numbers its nodes in order. The running node's number, compared with the counter noted at the
  end of each forward, gives its forward. Needed where a recompute runs outside of what enclosed its forward,
  such as in a tensor's hook.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import starmap
from operator import itemgetter
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node made on this thread will get."""

_top_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)  # not there in torch 2.7
TELLS_REGIONS = _top_hooks is not None
"""Tells that every non-reentrant checkpoint around a place is found; torch 2.7 misses the composable one."""
top_hooks: Callable[[bool], Any] = _top_hooks or bool
"""Returns the innermost saved-tensor hooks when called with True; something true where torch can't tell."""
_push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

_NO_NUMBER = 2**64 - 1  # AccumulateGrad's
_NEVER = object()

_RUN_BACKWARD = {
    method.__code__
    for name in ("apply", "apply_boxed")  # the latter from torch 2.13 on
    if (method := vars(BackwardCFunction).get(name)) is not None
}

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that autograd runs on this thread; -1 if it runs none."""


_REGION = {"unpack_hook": "frame", "checkpoint_unpack": "storage"}
"""Maps the function of a non-reentrant checkpoint that runs its region again to the variable that it has for
it alone: torch's, and DeepSpeed's."""


class _Region:
    """Stands for the region of a checkpoint."""


def in_backward() -> bool:
    """Return whether autograd runs backward on this thread."""
    return graph_task() != -1


def running_node_number() -> int | None:
    """Return the sequence number of the node whose backward is running, which it got in its forward."""
    node: Any = torch._C._current_autograd_node()
    number = _NO_NUMBER if node is None else int(node._sequence_nr())
    return None if number == _NO_NUMBER else number


def enclosing(*, functions: bool) -> list[Any]:
    """Return what encloses the running forward and may run it again; each lives as long as it may.

    With `functions`, also custom Functions, whose forwards run without grad. That walks the Python stack.
    """
    if not functions and _top_hooks is not None and _top_hooks(True) is None:
        return []
    running = list(_running_functions()) if functions else []
    if _top_hooks is None:
        return [*_regions_on_stack(), *running]
    # torch shows the innermost saved-tensor hooks only, so all are popped and pushed back. This is one line
    # that runs in C alone, since an interrupt between pop and push would lose the user's hooks.
    top = iter(partial(_top_hooks, True), None)
    pop = iter(_pop_hooks, _NEVER)
    lifted: Any = [hooks := [*zip(top, pop)], *starmap(_push_hooks, map(itemgetter(0), reversed(hooks)))][0]  # noqa: B905
    regions = []
    for (_, unpack), _ in lifted:
        # Hooks that never recompute, such as those for CPU offload, belong to no checkpoint. A method, or a
        # function of a module, is no checkpoint's: it lives longer than what may run again.
        names = unpack.__code__.co_freevars if isinstance(unpack, FunctionType) else ()
        if names and "checkpoint" in (getattr(unpack, "__module__", None) or ""):
            variable = _REGION.get(unpack.__code__.co_name, "")
            own = unpack.__closure__[names.index(variable)].cell_contents if variable in names else unpack
            regions.append(_region(own))
    return regions + running


def _region(variable: Any) -> Any:
    """Return what stands for a checkpoint's region: torch's frame, or an object on DeepSpeed's storage."""
    if isinstance(variable, WeakKeyDictionary):  # it has no hash
        return vars(variable).setdefault("npu_replay_region", _Region())
    return variable


def _regions_on_stack() -> Iterator[Any]:
    """Yield the open regions on torch 2.7, where hooks are hidden, except those of `checkpoint(module)`."""
    for frame in _frames():
        if frame.f_code.co_name == "checkpoint" and "gen" in frame.f_code.co_varnames:
            running = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            if running is not None and "new_frame" in running.f_locals:
                yield running.f_locals["new_frame"]


def recomputing() -> list[Any]:
    """Return what runs a forward again now, innermost first, of the objects that `enclosing` returned."""
    # A frame's f_back passes through autograd's C++ code into an outer backward.
    running: list[Any] = []
    for frame in _frames():
        if frame.f_code in _RUN_BACKWARD:
            running.append(frame.f_locals["self"])
        elif (variable := _REGION.get(frame.f_code.co_name, "")) in frame.f_code.co_freevars:
            running.append(_region(frame.f_locals.get(variable)))
    return running


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _running_functions() -> Iterator[Any]:
    """Yield the ctx of every custom autograd Function that is in its `forward`: a node of the graph to be.

    A ctx has metadata once its forward has ended; one that calls `forward` again in its backward is skipped.
    A Function with `setup_context` isn't found, since its forward gets no ctx: its recompute is then refused
    where the ids weren't kept. No product checkpoints by one.
    """
    for frame in _frames():
        code = frame.f_code
        # `self` is a module's: reading the locals of all frames would cost more than the walk.
        if code.co_name == "forward" and code.co_varnames[:1] not in ((), ("self",)):
            ctx: Any = frame.f_locals.get(code.co_varnames[0])
            is_ctx = isinstance(ctx, BackwardCFunction)
            if is_ctx and not ctx._input_metadata:
                yield ctx


@functools.cache
def probe() -> str | None:
    """Try the three facts on two tiny micro-batches; return what fails here, or None."""
    # On a thread of its own no backward runs and no checkpoint is open, so this may be called anywhere.
    with ThreadPoolExecutor(max_workers=1) as other:
        try:
            return other.submit(lambda: _fails(reentrant=True) or _fails(reentrant=False)).result()
        except Exception as error:  # noqa: BLE001  private names may be gone, or raise anything
            place = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error}, raised in {place.filename}, line {place.lineno}"


@torch.enable_grad()
def _fails(*, reentrant: bool) -> str | None:
    # Of each recompute, the number of the running node, and whether what encloses its forward runs it.
    seen: list[tuple[int, bool]] = []
    around: list[Any] = []  # what encloses each forward

    def watched(x: torch.Tensor) -> torch.Tensor:
        if in_backward():
            own = around[1 - len(seen)]  # backward begins with the last one
            number = running_node_number()
            seen.append((-1 if number is None else number, any(runner is own[0] for runner in recomputing())))
        else:
            around.append(enclosing(functions=reentrant))
        return (x * 2).sin()

    kind = "reentrant" if reentrant else "non-reentrant"
    weight = torch.ones(2, requires_grad=True, device="cpu")
    outputs = []
    ends = []
    for _ in range(2):
        outputs.append(checkpoint(watched, weight, use_reentrant=reentrant))
        ends.append(sequence_number())
    if in_backward() or seen or [len(objects) for objects in around] != [1, 1]:
        return f"a {kind} checkpoint can't be told while its forward runs"
    sum(output.sum() for output in outputs).backward()
    if len(seen) != 2 or not (seen[1][0] < ends[0] <= seen[0][0] < ends[1]):
        return f"a {kind} checkpoint's recompute doesn't lead back to its own forward"
    if not all(enclosed for _, enclosed in seen):
        return f"a {kind} checkpoint's recompute isn't inside what enclosed its forward"
    return None
