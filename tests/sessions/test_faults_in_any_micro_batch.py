"""Routers that do something else in one micro-batch of many: what is wrong is refused there, and only that.

Each case is a schedule drawn by chance: a model, a block, micro-batches with and without grad, a checkpoint,
and one fault, in one layer of one micro-batch. What a block recorded, or had to give, is held against what
the experts got and against the router's own code, run outside the block; a recompute is given other inputs
than its forward, so that by itself it would choose others.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch import topk as topk_taken_early
from torch.utils.checkpoint import CheckpointError

import npu_replay
from choice import some
from npu_replay import RoutedExperts
from npu_replay.errors import ReplayError
from zoo.beds import VOCABULARY, Bed, Map, bed_of, toy
from zoo.outcome import as_map, hooks, random_routes, same_experts
from zoo.toys import ToyBlock

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:Apex is not installed"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.usefixtures("toy_routers"),
]

NATIVE = torch.topk, torch.Tensor.topk
LEAST_ROWS = 3
MOST = 20


# Cases


@dataclass(frozen=True)
class Case:
    """What is drawn by chance.

    Attributes:
        grads: of each call of the model, in its order; `follow` has each micro-batch twice.
        at: the number of the call that has the fault.
        layer: which of the routers has it.
        backward: "each" right after its forward, or all at the end, in "reverse".
        warmed: a block was open before, in which nothing was wrong.
    """

    seed: str
    bed: str
    fault: str
    kind: str
    how: str | None
    grads: tuple[bool, ...]
    at: int
    layer: int
    backward: str
    warmed: bool
    again: bool
    """Does the recompute have the fault, and the forward not?"""

    @property
    def count(self) -> int:
        """Micro-batches."""
        return len(self.grads) // 2 if self.kind == "follow" else len(self.grads)

    @property
    def recomputes(self) -> bool:
        """Is the call that has the fault recomputed?"""
        return self.how is not None and self.grads[self.at]


def draw(bed: str, fault: str, number: int, *, again: bool = False) -> Case:
    seed = f"{bed}, {fault}, {number}"
    chance = random.Random(seed)
    kind = chance.choice(["record", "replay", "pin_recompute", "follow"])
    if kind == "follow" and bed.startswith("megatron"):
        kind = "replay"
    toys = "toy" in bed
    count = chance.randint(1, MOST) if toys else round(chance.triangular(1, MOST, 5))
    if kind == "follow":
        count = min(count, MOST // 2)
        grads = [False] * count + [True] * count
    else:
        share = chance.choice([0, 0.3, 1])
        grads = [chance.random() < share for _ in range(count)]
        if again and not any(grads):
            grads[-1] = True
    may = [index for index, grad in enumerate(grads) if grad or not again]
    unchecked = [index for index in may if index & (index - 1)]
    return Case(
        seed,
        bed,
        fault,
        kind,
        chance.choice(["reentrant", "non-reentrant"] if again else [None, "reentrant", "non-reentrant"]),
        tuple(grads),
        chance.choice(unchecked if unchecked and chance.random() < 0.8 else may),
        chance.randrange(3 if toys else 2),
        chance.choice(["each", "reverse"]),
        chance.random() < 0.5,
        again,
    )


# Faults: what a call of a router does, where it has one


@dataclass
class Now:
    """A call of a router that has the fault."""

    bed: Bed
    rows: int
    chance: random.Random
    run: Callable[[], Any]

    def figure(self, topk: Callable[..., Any] | None = None) -> bool:
        """A top-k of the router's own shape, over something else; is it that of these scores?"""
        scores = torch.rand(self.rows, self.bed.experts, generator=torch.Generator().manual_seed(1))
        if topk is not None or self.chance.random() < 0.5:
            ids = (topk or torch.topk)(scores, self.bed.topk, dim=-1)[1]
        else:
            ids = scores.topk(self.bed.topk)[1]
        return torch.equal(ids, scores.argsort(dim=1, descending=True)[:, : self.bed.topk])

    @contextlib.contextmanager
    def topk(self, instead: Callable[..., Any]) -> Iterator[None]:
        """What the router's code calls as torch.topk meanwhile; it is given that of before."""
        before = torch.topk

        def topk(*args: Any, **kwargs: Any) -> Any:  # Megatron compiles what calls it: no partial
            return instead(before, *args, **kwargs)

        torch.topk = topk
        try:
            yield
        finally:
            torch.topk = before

    def decides(self, scores: torch.Tensor) -> bool:
        """Is a top-k over these of the router's own shape?"""
        return scores.shape == (self.rows, self.bed.experts)

    def write(self, ids: torch.Tensor) -> None:
        """Into the ids that a top-k gave, as code behind it does."""
        experts = self.bed.experts
        how = self.chance.choice(["masked_fill_", "copy_", "a row"])
        if how == "masked_fill_":
            ids.masked_fill_(ids == ids[0, 0], (int(ids[0, 0]) + 1) % experts)
        elif how == "copy_":
            ids.copy_((ids + 1) % experts)
        else:
            ids[-1] = (ids[-1] + 1) % experts


def nothing(now: Now) -> Any:
    return now.run()


def figure_before(now: Now) -> Any:
    now.figure()
    return now.run()


def figure_before_by_an_early_alias(now: Now) -> Any:
    """Which a block may see, or not."""
    now.figure(topk_taken_early)
    return now.run()


def figure_after(now: Now) -> Any:
    output = now.run()
    assert now.figure(), "a top-k behind the router's own was answered"
    return output


def ids_written(now: Now) -> Any:
    def instead(before: Callable[..., Any], scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = before(scores, *args, **kwargs)
        if now.decides(scores):
            now.write(output[1])
        return output

    with now.topk(instead):
        return now.run()


def twice(now: Now) -> Any:
    """A figure over the very scores."""

    def instead(before: Callable[..., Any], scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if now.decides(scores):
            before(scores, *args, **kwargs)
        return before(scores, *args, **kwargs)

    with now.topk(instead):
        return now.run()


def other_figures_before(now: Now) -> Any:
    """None of them is of the router's own shape."""
    scores = torch.rand(now.rows, now.bed.experts, generator=torch.Generator().manual_seed(1))
    torch.topk(scores, now.bed.topk + 1)
    torch.topk(scores[:, :-1], now.bed.topk)
    scores.topk(now.bed.topk, largest=False)
    torch.topk(scores[None], now.bed.topk)
    return now.run()


def other_output(now: Now) -> Any:
    return now.bed.changed(now.run(), now.chance)


def sorts(now: Now) -> Any:
    def instead(before: Any, scores: torch.Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
        values, ids = scores.sort(dim=dim, descending=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), ids.narrow(dim, 0, k)))

    with now.topk(instead):
        return now.run()


def early_alias(now: Now) -> Any:
    with now.topk(lambda before, *args, **kwargs: topk_taken_early(*args, **kwargs)):
        return now.run()


class Again(Exception):
    """What makes somebody try a forward again."""


AGAIN = Again, KeyboardInterrupt


WRONG: dict[str, Callable[[Now], Any]] = {
    "figure_before": figure_before,
    "ids_written": ids_written,
    "other_output": other_output,
    "sorts": sorts,
    "not_called": nothing,
}
RIGHT: dict[str, Callable[[Now], Any]] = {
    "nothing": nothing,
    "figure_after": figure_after,
    "other_figures_before": other_figures_before,
    "early_alias_always": early_alias,
    "retried": nothing,
}
OPEN: dict[str, Callable[[Now], Any]] = {
    "twice": twice,
    "figure_before_by_an_early_alias": figure_before_by_an_early_alias,
    "early_alias_once": early_alias,
}
IN_RECOMPUTE = ("figure_before", "twice", "ids_written", "other_output", "sorts")
FAULTS = WRONG | RIGHT | OPEN
"""Of the last, and of what changes nothing, either is fine: an error that names its place, or the truth."""


def expected(case: Case) -> str:
    if case.again and case.fault != "twice":
        return "wrong"
    if case.bed == "toy blocks" and case.fault == "figure_after":
        return "open"
    if case.fault in RIGHT:
        return "right"
    if case.fault in OPEN:
        return "open"
    if case.kind == "pin_recompute":
        # A forward may choose as it likes: what counts is that its recompute chooses the same.
        differs = case.recomputes and case.fault in ("figure_before", "sorts")
        return "wrong" if differs else "open"
    return "wrong"


# A run


@dataclass
class Seen:
    """What the experts got in one call of a router, and what its own code chooses for that input."""

    layer: int
    rows: int
    phase: int
    again: bool
    used: Map | None = None
    own: Map | None = None


@dataclass
class Run:
    case: Case
    bed: Bed
    phase: int = 0
    """1 in the updates of `follow`."""
    failing: bool = False
    """Does the forward that runs now raise?"""
    stage: tuple[str, int] = ("enter", -1)
    seen: list[Seen] = field(default_factory=list)
    running: dict[int, Seen] = field(default_factory=dict)
    """The last call of each router."""

    def has_fault(self, layer: int, rows: int) -> bool:
        phase, micro_batch = divmod(self.case.at, self.case.count)
        here = (layer, rows, self.phase) == (self.case.layer, LEAST_ROWS + micro_batch, phase)
        return here or self.case.fault == "early_alias_always"

    def routed(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands for the forward of a router."""
        hidden = args[0]
        again = torch._C._current_graph_task_id() != -1
        rows = hidden.numel() // hidden.shape[-1]
        seen = Seen(layer, rows, self.phase, again)
        self.seen.append(seen)
        self.running[layer] = seen
        fed = -hidden if again else hidden  # by itself a recompute would choose others
        run = functools.partial(forward, fed, *args[1:], **kwargs)
        if not self.has_fault(layer, rows) or (self.case.again and not again):
            return run()
        chance = random.Random(self.case.seed)
        kind = chance.choice(AGAIN)
        early = chance.random() < 0.5
        if self.failing and early:
            raise kind
        output = FAULTS[self.case.fault](Now(self.bed, rows, chance, run))
        if self.failing:
            raise kind
        return output

    def after(self, layer: int, module: nn.Module, args: Any, output: Any) -> None:
        """A hook on a router, outside of the block's."""
        if (seen := self.running.get(layer)) is None:
            return
        if self.bed.used is not None:
            seen.used = self.bed.used(output)
        if not seen.again:
            seen.own = self.own(layer, args)

    def own(self, layer: int, args: Any) -> Map:
        """What the router's class chooses for this input, outside of the block's hooks."""
        module = self.bed.routers[layer]
        used = self.running[layer].used
        with torch.no_grad():
            output: Any = type(module).forward(module, *args)
        own = self.running[layer].used if isinstance(module, ToyBlock) else None
        self.running[layer].used = used
        if own is not None:
            return own
        return self.bed.used(output) if self.bed.used is not None else as_map(output[1], self.bed.experts)

    def taken(self, layer: int, module: nn.Module, args: Any, ids: torch.Tensor) -> None:
        """A hook on what the experts are given."""
        with torch._C.DisableTorchFunction():
            self.running[layer].used = as_map(ids, self.bed.experts)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for layer, module in enumerate(self.bed.routers):
                undo.callback(module.register_forward_hook(functools.partial(self.after, layer)).remove)
                _replace(undo, module, functools.partial(self.routed, layer, module.forward))
            for layer, module in enumerate(self.bed.layers):
                if hasattr(module, "taken"):
                    taken = functools.partial(self.taken, layer)
                    undo.callback(module.taken.register_forward_hook(taken).remove)
            if self.case.fault == "not_called":
                module = self.bed.layers[self.case.layer]
                _replace(undo, module, functools.partial(self.maybe_skipped, module.forward))
            yield

    def maybe_skipped(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = args[0]
        rows = hidden.numel() // hidden.shape[-1]
        if self.has_fault(self.case.layer, rows):
            self.running.pop(self.case.layer, None)
            return self.bed.skipped(hidden)
        return forward(*args, **kwargs)

    # The schedule

    def tokens(self, micro_batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(micro_batch)
        return torch.randint(VOCABULARY, (1, LEAST_ROWS + micro_batch), generator=generator)

    def block(self) -> Any:
        case = self.case
        model = self.bed.model
        if case.kind == "replay":
            return npu_replay.replay(model, self.given, live_mismatch=case.warmed)
        return getattr(npu_replay, case.kind)(model)

    @functools.cached_property
    def given(self) -> list[RoutedExperts]:
        """What no router here would choose."""
        rows = [LEAST_ROWS + number for number in range(self.case.count)]
        return random_routes(rows, range(len(self.bed.routers)), self.bed.experts, self.bed.topk, seed=5)

    def go(self, block: Any) -> None:
        losses: list[torch.Tensor] = []
        with block:
            for number, grad in enumerate(self.case.grads):
                self.phase = number // self.case.count
                self.stage = ("forward", number)
                if self.case.kind == "follow" and number == self.case.count:
                    self.move()
                with torch.set_grad_enabled(grad):
                    loss = self.forward(number)
                if not grad:
                    continue
                if self.case.backward == "each":
                    self.stage = "backward", number
                    loss.backward()
                else:
                    losses.append(loss)
                del loss
            self.stage = "backward", len(self.case.grads)
            while losses:
                losses.pop().backward()
            self.stage = "leave", len(self.case.grads)

    def forward(self, number: int) -> torch.Tensor:
        call = self.bed.call
        tokens = self.tokens(number % self.case.count)
        if number == self.case.at and self.case.fault == "retried":
            self.failing = True
            with contextlib.suppress(*AGAIN):
                call(tokens)
            self.failing = False
            self.seen = [
                seen for seen in self.seen if (seen.rows, seen.phase) != (tokens.numel(), self.phase)
            ]
        return call(tokens)

    def move(self) -> None:
        """An optimizer's step that the routers notice."""
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for module in self.bed.routers:
                module.weight.add_(torch.randn(module.weight.shape, generator=generator).to(module.weight))

    # What came of it

    def calls(self, micro_batch: int, layer: int, phase: int) -> list[Seen]:
        wanted = LEAST_ROWS + micro_batch, layer, phase
        return [seen for seen in self.seen if (seen.rows, seen.layer, seen.phase) == wanted]

    def untrue(self, block: Any) -> list[str]:
        """Where the experts got others than they should have."""
        problems = []
        for number, grad in enumerate(self.case.grads):
            micro_batch = number % self.case.count
            phase = number // self.case.count
            for layer in range(len(self.bed.routers)):
                calls = self.calls(micro_batch, layer, phase)
                if (problem := self._untrue(block, micro_batch, phase, layer, calls, grad)) is not None:
                    problems.append(f"call {number}, router {layer}: {problem}")
        return problems

    def _untrue(
        self, block: Any, micro_batch: int, phase: int, layer: int, calls: list[Seen], grad: bool
    ) -> str | None:
        case = self.case
        if any(call.used is None for call in calls) or (not calls and case.fault != "not_called"):
            return "the experts got nothing"
        if not calls:
            return "no call" if case.kind != "pin_recompute" else None
        first = calls[0]
        rest = calls[1:]
        if first.again or not all(call.again for call in rest):
            return "the calls are in no order"
        if grad and case.how is not None and not rest:
            return "nothing was recomputed"
        if not all(torch.equal(call.used, first.used) for call in rest):
            return "its recompute took others than its forward"
        if case.kind == "record" and not same_experts(block.routes[micro_batch], layer, first.used):
            return "recorded others than were used"
        if case.kind == "replay":
            if not same_experts(self.given[micro_batch], layer, first.used):
                return "used others than were given"
        elif phase == 1:
            if not torch.equal(self.calls(micro_batch, layer, 0)[0].used, first.used):
                return "used others than were recorded"
        elif not torch.equal(first.own, first.used) and case.fault not in ("ids_written", "other_output"):
            return "used others than its own choice"
        return None


def _replace(undo: contextlib.ExitStack, module: Any, forward: Callable[..., Any]) -> None:
    """Another forward for the length of a case: an attribute of the module's own, as its checkpoint is."""
    before = vars(module).get("forward")
    module.forward = forward
    if before is None:
        undo.callback(vars(module).pop, "forward", None)
    else:
        undo.callback(setattr, module, "forward", before)


def judge(case: Case) -> list[str]:
    """What is wrong with how this case went."""
    bed = bed_of(case.bed, case.how)
    weights = [(weight, weight.detach().clone()) for module in bed.routers for weight in [module.weight]]
    bed.model.zero_grad()
    run = Run(case, bed)
    if case.warmed:
        with torch.no_grad(), npu_replay.record(bed.model):
            bed.call(run.tokens(0))
    block = run.block()
    raised: BaseException | None = None
    with run.installed():
        try:
            run.go(block)
        except Exception as error:
            raised = error.with_traceback(None)
    with torch.no_grad():
        for weight, before in weights:
            weight.copy_(before)
    return [*_judged(run, block, raised), *_left(bed)]


def _judged(run: Run, block: Any, raised: BaseException | None) -> list[str]:
    case = run.case
    wanted = expected(run.case)
    if raised is None:
        untrue = run.untrue(block)
        if untrue:
            return [f"wrong in silence: {untrue[0]}" + (f" and {len(untrue) - 1} more" if untrue[1:] else "")]
        return ["passed, though it is wrong"] if wanted == "wrong" else []
    message = f"{type(raised).__name__} in {' '.join(map(str, run.stage))}: {str(raised)[:160]}"
    said_without_a_block = "modified by an inplace", "split_with_sizes"
    if (
        wanted == "open"
        and case.fault == "ids_written"
        and any(words in str(raised) for words in said_without_a_block)
    ):
        return []  # torch's own, of what the router did
    if isinstance(raised, CheckpointError) and run.stage[0] == "backward":
        return []  # torch's own, of a recompute with other operations than its forward
    if not isinstance(raised, ReplayError):
        return [f"raised no ReplayError, but {message}"]
    if wanted == "right":
        return [f"refused, though it is right: {message}"]
    named = re.search(r"micro-batch (\d+)", raised.where)
    if named is None or int(named.group(1)) != case.at:
        return [f"refused, but not by its place: {message}"]
    # On leaving, and in a backward at the end, the number is that of all calls.
    what, number = run.stage
    if case.again or wanted == "open" or case.fault == "twice":  # which shows in a recompute alone
        return [] if what == "backward" or number == case.at else [f"refused late: {message}"]
    return [] if number in (case.at, case.at + 1) else [f"refused late: {message}"]


def _left(bed: Bed) -> list[str]:
    """What is left of a case."""
    traces = []
    if (torch.topk, torch.Tensor.topk) != NATIVE:
        traces.append("topk is replaced")
    if modes := torch._C._len_torch_function_stack():
        traces.append(f"{modes} function modes are on")
    if left := hooks(bed.model):
        traces.append(f"{left} hooks on modules")
    if npu_replay.report().open_sessions:
        traces.append("open sessions")
    return traces


# The tests


CASES = {
    "toy": 8,
    "masked toy": 6,
    "Qwen3Moe": 3,
    "Mixtral": 3,
    "GptOss": 3,
    "megatron": 3,
    "megatron in groups": 2,
}
"""How many of each fault in ci/all.sh: 28 of each of 18, 504 in all; a third of them elsewhere."""


def check(cases: Sequence[Case]) -> None:
    wrong = {case: problems for case in cases if (problems := judge(case))}
    report = "\n".join(f"{case}: {'; '.join(problems)}" for case, problems in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(cases)} cases\n{report}"


@pytest.mark.parametrize(
    "bed",
    [
        pytest.param(
            name,
            marks=[pytest.mark.megatron] * name.startswith("megatron")
            + [pytest.mark.slow] * (name in ("Mixtral", "GptOss")),  # of transformers' three one is quick
        )
        for name in CASES
    ],
)
@pytest.mark.parametrize(
    ("fault", "again"), [*((fault, False) for fault in FAULTS), *((fault, True) for fault in IN_RECOMPUTE)]
)
def test_what_is_wrong_in_one_micro_batch_is_refused_in_it_and_the_rest_is_right(
    bed: str, fault: str, again: bool
) -> None:
    check([draw(bed, fault, number, again=again) for number in range(some(CASES[bed]))])


@pytest.mark.parametrize("fault", [fault for fault in WRONG | RIGHT if fault != "other_output"])
def test_a_block_that_routes_itself_is_never_wrong_in_silence(fault: str) -> None:
    """Its output shows no ids. A figure after the top-k may be refused, too."""
    check([draw("toy blocks", fault, number) for number in range(some(6))])


# Compiled functions: without any hook of the test's, which would break their graphs


@pytest.mark.slow
@pytest.mark.choice
@pytest.mark.parametrize("part", ["model", "layer"])
@pytest.mark.parametrize("kind", ["record", "replay", "pin_recompute", "follow"])
def test_a_compiled_function_around_one_micro_batch_is_never_wrong_in_silence(kind: str, part: str) -> None:
    """It runs in micro-batch 3 or 5, and is right, refused there, or stopped by the compiler."""
    at = random.Random(f"{kind} {part}").choice([3, 5])
    bed = toy(masked=False)
    model: Any = bed.model
    layer = model.body.layers[1]
    micro_batches = [torch.randint(VOCABULARY, (1, LEAST_ROWS + number)) for number in range(6)]
    rows = [ids.numel() for ids in micro_batches]
    routes = [random_routes(rows, range(3), bed.experts, bed.topk, seed=5)] if kind == "replay" else []
    with torch.no_grad(), getattr(npu_replay, kind)(model, *routes) as eager:
        truth = [model(ids) for ids in micro_batches]
    outputs = []
    refused = ""
    torch._dynamo.reset()
    try:
        with torch.no_grad(), getattr(npu_replay, kind)(model, *routes) as session:
            for number, ids in enumerate(micro_batches):
                call = model
                if number == at and part == "model":
                    call = torch.compile(lambda input_ids: model(input_ids), backend="eager")
                elif number == at:
                    layer.forward = torch.compile(layer.forward, backend="eager")
                outputs.append(call(input_ids=ids))
                vars(layer).pop("forward", None)
        assert all(map(torch.equal, outputs, truth)), "wrong in silence"
        assert kind != "record" or session.routes == eager.routes
    except (ReplayError, torch._dynamo.exc.TorchDynamoException) as error:
        refused = getattr(error, "where", f"micro-batch {at}")
    torch._dynamo.reset()
    assert not refused or (f"micro-batch {at}" in refused and len(outputs) in (at, at + 1))
    assert not _left(bed)
