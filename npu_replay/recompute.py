"""What autograd tells about a forward inside backward: that it is a recompute, and whose.

Three facts, all private to torch, so `probe()` checks them once in each process before they are relied on:

- `_current_graph_task_id() != -1` exactly while autograd runs backward, on whatever thread. Grad mode does
  not tell: a reentrant checkpoint's first pass runs under no_grad.
- Sequence numbers grow with every node that a thread makes. The number of the node that is running, held
  against the counter noted at the end of each forward of the model, is the forward that made it.
- A checkpoint that may yet recompute is alive: the node of a reentrant one, the region of a non-reentrant
  one. When the graph dies, they die.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node made on this thread will get."""

_top_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)  # not there in torch 2.7

_NO_NUMBER = 2**64 - 1  # AccumulateGrad's


def in_backward() -> bool:
    """Is this thread running autograd's backward?"""
    return bool(torch._C._current_graph_task_id() != -1)


def running_node_number(known: Container[Any]) -> int | None:
    """The sequence number of the node whose backward is running, as it was made in the forward.

    Inside a reentrant checkpoint the running node may itself be a product of the outer recompute, so the
    innermost custom Function on the Python stack in whose forward a router was called (`known`) is asked; a
    frame's `f_back` leads through autograd's C++ into the outer backward. Not the outermost: where a model is
    on several devices, the thread of one takes up another micro-batch's checkpoint while it waits.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    enclosing = [ctx for ctx in _functions(sys._getframe(1), "backward") if ctx in known]
    number = int((enclosing[0] if enclosing else node)._sequence_nr())
    return None if number == _NO_NUMBER else number


def _functions(frame: FrameType | None, method: str) -> Iterator[Any]:
    """The ctx of every custom autograd Function that is in its `forward` or `backward`, innermost first.

    A frame whose first name is `self` is a module's: reading its `f_locals` would keep the tensors in
    it alive (before Python 3.13 the snapshot is cached on the frame), so it is passed over.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == method and code.co_varnames[:1] not in ((), ("self",)):
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                yield first
        frame = frame.f_back


def enclosing_function() -> Any:
    """The ctx of the outermost custom Function whose forward runs, a reentrant checkpoint's for one.

    It is a node, and alive as long as its backward may come.
    """
    found = None
    for ctx in _functions(sys._getframe(1), "forward"):
        found = ctx
    return found


def open_region() -> Any:
    """Inside a non-reentrant checkpoint: what stands for it, alive as long as it may have to recompute.

    Other saved-tensor hooks (offloading to the CPU) never recompute and are told by their module.
    """
    if _top_hooks is None:
        return _region_on_stack()
    hooks = _top_hooks(True)
    unpack: Any = None if hooks is None else hooks[1]
    if "checkpoint" not in (getattr(unpack, "__module__", None) or ""):
        return None
    names = unpack.__code__.co_freevars if isinstance(unpack, FunctionType) else ()
    return unpack.__closure__[names.index("frame")].cell_contents if "frame" in names else unpack


def _region_on_stack() -> Any:
    """The same where torch doesn't tell which hooks are on: a local of the generator that `checkpoint` runs.

    The composable `checkpoint(module)` keeps its generator elsewhere, and isn't found.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "checkpoint" and "gen" in frame.f_code.co_varnames:
            running = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            if running is not None and "new_frame" in running.f_locals:
                return running.f_locals["new_frame"]
        frame = frame.f_back
    return None


def recomputing_regions() -> list[Any]:
    """The regions of the non-reentrant checkpoints that are being recomputed, innermost first."""
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and "frame" in frame.f_code.co_freevars:
            found.append(frame.f_locals.get("frame"))
        frame = frame.f_back
    return found


@functools.cache
def probe() -> str | None:
    """Try the three facts on two tiny micro-batches; return what fails here, or None.

    In a thread of its own, where no backward runs and no checkpoint is open, so it can be asked anywhere.
    """
    with ThreadPoolExecutor(max_workers=1) as other:
        try:
            return other.submit(_probe).result()
        except Exception as error:  # noqa: BLE001  private names may be gone, or raise anything
            return f"{type(error).__name__}: {error}"


def _probe() -> str | None:
    with torch.enable_grad():
        for reentrant in (True, False):
            seen: list[int | None] = []
            alive: list[Any] = []
            watch = functools.partial(_watched, seen=seen, alive=alive, reentrant=reentrant)
            weight = torch.ones(2, requires_grad=True)
            outputs, ends = [], []
            for _ in range(2):
                outputs.append(checkpoint(watch, weight, use_reentrant=reentrant))
                ends.append(sequence_number())
            kind = "reentrant" if reentrant else "non-reentrant"
            if in_backward() or seen or any(token is None for token in alive):
                return f"a {kind} checkpoint can't be told while its forward runs"
            sum(output.sum() for output in outputs).backward()
            numbers = [-1 if number is None else number for number in seen]
            if len(numbers) != 2 or not (numbers[1] < ends[0] <= numbers[0] < ends[1]):
                return f"a {kind} checkpoint's recompute doesn't lead back to its own forward"
            del outputs
    return None


def _watched(
    x: torch.Tensor,
    *,
    seen: list[int | None],
    alive: list[Any],
    reentrant: bool,
) -> torch.Tensor:
    if in_backward():
        seen.append(running_node_number(alive))
    elif reentrant:
        alive.append(enclosing_function())
    else:
        alive.append(open_region())
    return (x * 2).sin()
