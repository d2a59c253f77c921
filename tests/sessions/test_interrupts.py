"""An interrupt at any line of npu_replay that a block runs comes out of it, and leaves nothing behind.

A trace function raises the KeyboardInterrupt, at one line a run. A run is made in a child process, which goes
on with the next line as long as nothing was left behind: so what one run leaves never spoils another.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import json
import operator
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.sessions import backward, seam
from npu_replay.sessions.guarded import here
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.session import open_sessions
from zoo.toys import HIDDEN, ToyBlock, ToyLayer, ToyRouter, in_groups
from zoo.toys import foreign as foreign_routes

pytestmark = [
    pytest.mark.usefixtures("few_objects", "toy_routers"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="each run is made in a child of this process"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]

OURS = str(Path(npu_replay.__file__).parent) + os.sep
NATIVE = torch.topk, torch.Tensor.topk
SECONDS = 5
"""After which a run is taken for one that hangs."""
Result = list[torch.Tensor | None]


def open_calls() -> list[str]:
    """What of private state says that a call of a router is still open: here alone it is looked at."""
    found = []
    if seam.armed() is not None:
        found.append("a call is armed")
    if here.call is not None:
        found.append("a call is running")
    if seam.guard.is_open or seam.guard._holders:
        found.append("the guard counts a block that is over")
    return found


def forget_what_is_known() -> None:
    """What the process has learned of torch in earlier runs: the next one asks again."""
    backward.probe.cache_clear()
    backward._codes.clear()


# What runs


class Model(nn.Module):
    """A masked router in a non-reentrant checkpoint, a plain one in a reentrant one, and a block in none."""

    config = SimpleNamespace(num_hidden_layers=3, get_text_config=lambda: Model.config)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, HIDDEN)
        masked = ToyRouter(select=in_groups, masks=True)
        other = ToyRouter(drops=True)
        self.layers = nn.ModuleList([ToyLayer(masked), ToyLayer(other), ToyBlock()])
        self.reentrant = [False, True, None]
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids.flatten())
        for layer, reentrant in zip(self.layers, self.reentrant, strict=True):
            if reentrant is None or not torch.is_grad_enabled():
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        return hidden


def fed(seed: int) -> torch.Tensor:
    return torch.randint(50, (1, 4), generator=torch.Generator().manual_seed(seed))


def with_grad(model: nn.Module, *seeds: int) -> Result:
    outputs = []
    for seed in seeds:
        outputs.append(model(input_ids=fed(seed)))
        outputs[-1].square().mean().backward()
    return [*(one.detach() for one in outputs), *(one.grad for one in model.parameters())]


def without_grad(model: nn.Module, *seeds: int) -> Result:
    with torch.no_grad():
        return [model(input_ids=fed(seed)) for seed in seeds]


def update(model: nn.Module) -> Result:
    """Four micro-batches; in the last one, number 3, the effect needn't be checked."""
    return [*with_grad(model, 0), *without_grad(model, 1, 2), *with_grad(model, 3)]


def recorded_and_updated(model: nn.Module, *seeds: int) -> Result:
    return [*without_grad(model, *seeds), *with_grad(model, *seeds)]


def in_a_dispatch_mode(model: nn.Module) -> Result:
    with Passing():
        return update(model)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def foreign(model: Model, count: int) -> list[RoutedExperts]:
    """Routes that no router here would choose; in each micro-batch a row has none."""
    return foreign_routes(count, layers=len(model.layers), rows=4, recorded=torch.arange(4) != 2)


@dataclass(frozen=True)
class Kind:
    """A kind of block, of a model and a number of micro-batches, and what runs in it: all, or a part."""

    make: Callable[[Model, int], Any]
    body: Callable[[nn.Module], Result] = update
    part: Callable[[nn.Module], Result] = lambda model: with_grad(model, 0)

    def run(self, model: Model) -> Result:
        with self.make(model, 4):
            return self.body(model)

    def run_a_part(self, model: Model) -> Result:
        with self.make(model, 1):
            return self.part(model)


KINDS = {
    "record": Kind(lambda model, _: npu_replay.record(model)),
    "replay": Kind(lambda model, n: npu_replay.replay(model, foreign(model, n), live_mismatch=True)),
    "pin_recompute": Kind(lambda model, _: npu_replay.pin_recompute(model)),
}
OTHERS = {
    "in a dispatch mode": Kind(lambda model, _: npu_replay.record(model), in_a_dispatch_mode),
    "step by step": Kind(lambda model, _: StepRecording(model, errors_wait=True)),
    "observe": Kind(lambda model, _: npu_replay.observe(model)),
    "follow": Kind(
        lambda model, _: npu_replay.follow(model),
        lambda model: recorded_and_updated(model, 0, 1),
        lambda model: recorded_and_updated(model, 0),
    ),
}


class Theirs(TorchFunctionMode):
    """Somebody else's mode, and somebody else's hooks on saved tensors: what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.packed = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed += 1
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))

    def seen_of_one_operation(self) -> tuple[int, int]:
        """Of `exp`, which saves one tensor: how many operations and saved tensors come here."""
        x = torch.ones(1, requires_grad=True)
        before = self.operations, self.packed
        torch.exp(x)
        return self.operations - before[0], self.packed - before[1]


# Lines


@dataclass(frozen=True)
class Line:
    """One passing of a line: the `time`-th of `times` in a run, counted from 1. `first`: in a process's first
    run alone."""

    code: CodeType
    number: int
    time: int
    times: int
    first: bool

    def __str__(self) -> str:
        file = Path(self.code.co_filename).relative_to(Path(OURS).parent)
        return f"{file}:{self.number} ({self.code.co_name}, {self.time} of {self.times})"


Passes = Callable[[CodeType, int], None]


def trace(wanted: Callable[[CodeType], bool], passes: Passes) -> Any:
    """A trace function that calls `passes` before each line of code that is wanted.

    The end of a with statement has its line again, and is left out: between its body and the call of
    `__exit__` the interpreter looks for no signal.
    """

    def entered(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not wanted(code):
            return None
        bodies = bodies_of_with(code.co_filename)
        before = frame.f_lineno

        def line(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "line":
                before, was = frame.f_lineno, before
                if was not in bodies.get(before, ()):
                    passes(code, before)
            return line

        return line

    return entered


@functools.cache
def bodies_of_with(file: str) -> dict[int, range]:
    """By the lines of the managers of a with statement, the lines of its body."""
    found = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.With)]
    return {
        item.context_expr.lineno: range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        for node in found
        for item in node.items
    }


@contextlib.contextmanager
def tracing(wanted: Callable[[CodeType], bool], passes: Passes) -> Iterator[None]:
    """In this thread, and in those that begin meanwhile: one asks autograd what it tells."""
    function = trace(wanted, passes)
    threading.settrace(function)
    sys.settrace(function)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


class Interrupt:
    """Raises a KeyboardInterrupt at one passing of a line, once.

    Attributes:
        at_an_end: did it come inside the block's own `__enter__` or `__exit__`?
    """

    def __init__(self, line: Line, block: object) -> None:
        self.line = line
        self.passed = 0
        self.at_an_end = False
        self._block = id(block)

    def __call__(self, code: CodeType, number: int) -> None:
        self.passed += number == self.line.number
        if self.passed == self.line.time and number == self.line.number:
            self.at_an_end = any(map(self._is_an_end, frames()))
            raise KeyboardInterrupt(str(self.line))

    def _is_an_end(self, frame: FrameType) -> bool:
        named = frame.f_code.co_name in ("__enter__", "__exit__")
        return named and id(frame.f_locals.get("self")) == self._block


def frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def lines_of(kind: Kind) -> list[Line]:
    """The first passing of each line; of those of sessions/ also the last, and the first one in backward."""
    _passed(kind)  # what a process imports and learns on the way is passed in its first run alone
    forget_what_is_known()
    first = _passed(kind)
    later = _passed(kind)
    return [
        Line(*place, time, len(passed), place not in later)
        for place, passed in {**first, **later}.items()
        for time in sorted({1, *(_others(passed) if "sessions" in place[0].co_filename else ())})
    ]


def _others(passed: list[bool]) -> set[int]:
    return {len(passed), passed.index(True) + 1} if True in passed else {len(passed)}


def _passed(kind: Kind) -> dict[tuple[CodeType, int], list[bool]]:
    """Of each line of ours, its passings in a run: was each of them in backward?"""
    passed: dict[tuple[CodeType, int], list[bool]] = {}
    model = Model()
    theirs = Theirs()
    block = kind.make(model, 4)
    gc.collect()
    gc.disable()  # so that the death of what lies in a cycle is no line of another run
    ours = tracing(
        lambda code: code.co_filename.startswith(OURS),
        lambda *place: passed.setdefault(place, []).append(torch._C._current_graph_task_id() != -1),
    )
    try:
        with theirs, theirs.hooks, ours, block:
            kind.body(model)
    finally:
        gc.enable()
    return passed


# Runs


def interrupted(kind: Kind, line: Line, truth: Result) -> list[str]:
    """One run with an interrupt at this line: what came out wrong, or is left behind."""
    if line.first:
        forget_what_is_known()
    model, theirs = Model(), Theirs()
    block = kind.make(model, 4)
    found = []
    interrupt = Interrupt(line, block)
    gone = weakref.ref(block)
    sys.unraisablehook = lambda told: found.append(f"{told.exc_type.__name__} was swallowed")
    try:
        with theirs, theirs.hooks:
            found += _came_out(block, lambda: kind.body(model), interrupt)
            if interrupt.at_an_end:
                del block  # what it had begun ends with it, at the latest
            gc.collect()
            found += _left(model)
            if (modes := torch._C._len_torch_function_stack()) != 1:
                found.append(f"{modes} function modes are on, not theirs alone")
            if (seen := theirs.seen_of_one_operation()) != (1, 1):
                found.append(f"their mode and hooks on saved tensors see {seen}, not (1, 1)")
    except RuntimeError as error:
        found.append(f"their own with statement raises {error}"[:100])
    if modes := torch._C._len_torch_function_stack():
        found.append(f"{modes} function modes are on after theirs")
    if (seen := theirs.seen_of_one_operation()) != (0, 0):
        found.append(f"their mode and hooks still see {seen} after their end")
    block = None
    gc.collect()
    if gone() is not None:
        found.append("the block is kept alive")
    return found or _wrong_in_a_clean_run(kind, model, truth)


def _came_out(block: Any, run: Callable[[], object], interrupt: Interrupt) -> list[str]:
    """What came out of the with statement, if it isn't the interrupt."""
    line = interrupt.line
    found = []
    gc.disable()
    try:
        with tracing(functools.partial(operator.is_, line.code), interrupt), block:
            run()
    except BaseException as error:
        if type(error) is not KeyboardInterrupt or error.args != (str(line),):
            found.append(f"{type(error).__name__} came out: {error}"[:200])
    else:
        found.append("nothing came out" if interrupt.passed >= line.time else "the line wasn't passed")
    finally:
        gc.enable()
    return found


def _left(model: nn.Module) -> list[str]:
    """What is left behind on the model, in the process and on this thread."""
    found = open_calls()
    if (torch.topk, torch.Tensor.topk) != NATIVE or "topk" in vars(torch.Tensor):
        found.append("topk is replaced")
    if opened := open_sessions():
        found.append(f"open sessions: {', '.join(map(str, opened))}")
    hooks = sum(len(vars(one)[name]) for one in model.modules() for name in vars(one) if "_hooks" in name)
    if hooks:
        found.append(f"{hooks} hooks on modules")
    if torch._C._len_torch_dispatch_stack():
        found.append("a dispatch mode is on")
    if not torch.is_grad_enabled():
        found.append("grad is off")
    return found


def _wrong_in_a_clean_run(kind: Kind, model: Model, truth: Result) -> list[str]:
    model.zero_grad()
    try:
        again = kind.run_a_part(model)
    except Exception as error:
        return [f"a clean run afterwards raises {type(error).__name__}: {error}"[:200]]
    left = [f"after a clean run {one}" for one in _left(model)]
    return left if alike(again, truth) else [*left, "a clean run afterwards gives others"]


def alike(a: Result, b: Result) -> bool:
    return len(a) == len(b) and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


# Children


def in_children(lines: Sequence[Line], run: Callable[[Line], list[str]]) -> Iterator[tuple[Line, list[str]]]:
    """The lines at which something is wrong. A child ends with the first of them, and another goes on."""
    at = 0
    while at < len(lines):
        found = _in_a_child(lines[at:], run)
        at += len(found)
        if found[-1]:
            yield lines[at - 1], found[-1]


def _in_a_child(lines: Sequence[Line], run: Callable[[Line], list[str]]) -> list[list[str]]:
    """What was found, line by line, up to the first at which something is wrong."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        _report(lines, run, writes)
    os.close(writes)
    with open(reads, "rb") as told:
        found = [json.loads(one) for one in told.read().splitlines()]
    ended = os.waitpid(child, 0)[1]
    if ended:
        found.append([f"the process died by signal {os.waitstatus_to_exitcode(ended)}"])
    return found


def _report(lines: Sequence[Line], run: Callable[[Line], list[str]], writes: int) -> None:
    try:
        gc.freeze()  # what was there before needn't be collected again and again
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for line in lines:
            signal.alarm(SECONDS)
            found = run(line)
            os.write(writes, json.dumps(found).encode() + b"\n")
            if found:
                break
    finally:
        os._exit(0)


def check(kind: Kind, lines: Sequence[Line]) -> None:
    truth = kind.run_a_part(Model())
    wrong = dict(in_children(lines, lambda line: interrupted(kind, line, truth)))
    told = "\n".join(f"{line}: {'; '.join(found)}" for line, found in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(lines)} interrupts\n{told}"


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", KINDS)
def test_an_interrupt_at_any_line_of_a_block_leaves_nothing_behind(name: str, step: int) -> None:
    check(KINDS[name], lines_of(KINDS[name])[::step])


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", OTHERS)
def test_an_interrupt_at_a_line_that_other_blocks_run_leaves_nothing_behind(name: str, step: int) -> None:
    known = {(line.code, line.number) for kind in KINDS.values() for line in lines_of(kind)}
    lines = [line for line in lines_of(OTHERS[name]) if (line.code, line.number) not in known]
    assert lines
    check(OTHERS[name], lines[::step])
