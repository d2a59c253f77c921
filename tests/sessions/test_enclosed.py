"""Checkpoints in checkpoints, in hooks, in functions: whatever encloses a forward, a recompute is its own.

On several devices, whose threads share no frames: tests/device/test_spread.py.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.errors import RecomputeError
from npu_replay.seam import backward
from zoo.toys import (
    EXPERTS,
    ROWS,
    SAVED_TENSOR_HOOKS,
    ToyLayer,
    ToyModel,
    ToyRouter,
    foreign,
    opened,
    plain,
    tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.usefixtures("toy_routers"),
]

KINDS = ["record", "replay", "replay with holes", "pin_recompute"]
HOW = ["reentrant", "non-reentrant"]
Run = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]


class Drifting(ToyRouter):
    """Chooses anew in each call: what isn't pinned or replayed in a recompute shows in the gradients."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(select=self._drift)

    def _drift(self, _: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Drifting.calls += not backward.in_backward()
        seed = 1000 + Drifting.calls if backward.in_backward() else Drifting.calls
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed))
        ids = plain(self, scores.detach() + noise)[1]
        return scores.gather(1, ids), ids


@pytest.fixture(params=SAVED_TENSOR_HOOKS)
def either_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7 doesn't tell which saved-tensor hooks are on."""
    if request.param == "hooks not told":
        monkeypatch.setattr(backward, "_top_hooks", None)


def block(kind: str, model: ToyModel, count: int) -> Any:
    recorded = torch.arange(ROWS) % 3 != 0 if "holes" in kind else None
    return opened(kind.removesuffix(" with holes"), model, count, recorded=recorded)


def gradients(kind: str, model: ToyModel, loss: Loss, order: str) -> list[torch.Tensor]:
    """Of five micro-batches; their losses differ, so a swapped recompute shows."""
    Drifting.calls = 0
    model.zero_grad()
    with block(kind, model, 5):
        losses = [loss(model, tokens(seed).requires_grad_(), seed) for seed in range(5)]
        if order == "sum":
            sum(losses).backward()
        else:
            for number in (1, 3, 2, 4, 0):
                losses[number].backward()
        del losses
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]


def plainly(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    return (model(x).sin() * (seed + 1)).square().mean()


def close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Another expert shows in the second digit."""
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(actual, expected, strict=True))


# Several forwards in one


@pytest.mark.parametrize("kind", ["record", "replay", "pin_recompute"])
@pytest.mark.parametrize(("how", "inner"), [(HOW[0], None), (HOW[0], HOW[1]), (HOW[1], HOW[0])])
def test_several_forwards_in_one_checkpoint_are_refused(how: str, inner: str | None, kind: str) -> None:
    """Their recomputes look alike; its only node is older than all of them."""
    model = ToyModel(recompute=inner)

    def both(x: torch.Tensor) -> torch.Tensor:
        return sum((model(x * scale).square().mean() for scale in (1, 2, 3)), torch.zeros(()))

    with pytest.raises(RecomputeError, match="one checkpoint holds several"), block(kind, model, 3):
        checkpoint(both, tokens().requires_grad_(), use_reentrant=how == "reentrant").backward()


@pytest.mark.choice
@pytest.mark.parametrize("order", ["sum", "1, 2, 0"])
@pytest.mark.parametrize("kind", ["record", "replay", "pin_recompute"])
@pytest.mark.parametrize("inner", [None, *HOW])
@pytest.mark.parametrize("outer", HOW)
@pytest.mark.usefixtures("either_torch")
def test_two_chunks_in_one_checkpoint_are_told_apart(
    outer: str, inner: str | None, kind: str, order: str
) -> None:
    """It holds a forward of each chunk, and each chunk's routers find their own."""

    def run(recompute: bool) -> list[torch.Tensor]:
        Drifting.calls = 0
        chunks = [ToyModel(Drifting(), Drifting(), recompute=inner if recompute else None) for _ in range(2)]
        ids = [torch.cat([part.ids for part in (a, b)], dim=1) for a, b in [foreign(2)] * 3]
        routes = [RoutedExperts(ids=micro_batch, layers=range(4), num_experts=EXPERTS) for micro_batch in ids]
        both = nn.Sequential(*chunks)
        arguments = (chunks, routes) if kind == "replay" else (chunks,)
        with getattr(npu_replay, kind)(*arguments):
            losses = []
            for seed in range(3):
                x = tokens(seed).requires_grad_()
                hidden = checkpoint(both, x, use_reentrant=outer == "reentrant") if recompute else both(x)
                losses.append((hidden.sin() * (seed + 1)).square().mean())
            for part in [losses] if order == "sum" else [[losses[number]] for number in (1, 2, 0)]:
                sum(part).backward()
            del losses, part
        return [parameter.grad.clone() for parameter in both.parameters()]

    assert all(map(torch.equal, run(recompute=True), run(recompute=False)))


# Routers that autograd doesn't see


class Hidden(ToyLayer):
    """A layer that runs its router under no_grad, or under somebody's saved-tensor hooks."""

    def __init__(self, under: str) -> None:
        super().__init__(Drifting())
        self.under = under

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad() if self.under == "no_grad" else HOOKS[self.under]():
            values, ids = self.router(hidden)
        return hidden + torch.einsum("tk,tkhg,th->tg", values.detach(), self.experts[ids], hidden).tanh()


HOOKS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "own": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.choice
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("under", ["no_grad", *HOOKS])
def test_a_router_that_autograd_does_not_see_is_recomputed_as_it_was(under: str, how: str, kind: str) -> None:
    """And is due when the block ends before backward."""

    expected = gradients(kind, ToyModel(Hidden(under), Hidden(under)), plainly, "sum")
    model = ToyModel(Hidden(under), Hidden(under), recompute=how)
    close(gradients(kind, model, plainly, "sum"), expected)
    with pytest.raises(RecomputeError, match="the block ended before 2 router calls"), block(kind, model, 1):
        kept = model(tokens().requires_grad_())
    assert len(kept) == ROWS


# Functions of somebody's own


class Rerun(torch.autograd.Function):
    """A checkpoint of somebody's own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.run(x)
        output.backward(grad)
        return None, x.grad


class Wrapped(Rerun):
    """The same, behind what torch.amp puts around a forward."""

    @staticmethod
    def forward(*args: Any) -> torch.Tensor:
        return Rerun.forward(*args)


class Unseen(Rerun):
    """In the newer style, whose forward gets no ctx."""

    @staticmethod
    def forward(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(inputs[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_whose_forward_gets_no_ctx_is_never_wrong_in_silence(kind: str) -> None:
    def rerun(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
        return plainly(lambda x: Unseen.apply(model, x), x, seed)

    expected = gradients(kind, ToyModel(Drifting(), Drifting()), plainly, "each")
    if kind in ("record", "replay"):  # whose ids are there in any case
        close(gradients(kind, ToyModel(Drifting(), Drifting()), rerun, "each"), expected)
        return
    with pytest.raises(RecomputeError, match=r"not foreseen|no forward of this block"):
        gradients(kind, ToyModel(Drifting(), Drifting()), rerun, "each")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", HOW)
def test_the_innermost_that_runs_again_tells_the_micro_batch(layers: str, kind: str) -> None:
    """The backward of one micro-batch runs in the middle of another's recompute."""

    def run(recompute: bool) -> list[torch.Tensor]:
        Drifting.calls = 0
        model = ToyModel(Drifting(), Drifting(), recompute=layers if recompute else None)
        losses: list[torch.Tensor] = []

        def first(x: torch.Tensor) -> torch.Tensor:
            output = model(x)
            if backward.in_backward():
                output.register_hook(lambda grad: losses.pop().backward())
            return output

        with block(kind, model, 2):
            x = tokens(0).requires_grad_()
            outer = plainly(lambda x: Rerun.apply(first, x) if recompute else model(x), x, 0)
            losses.append(plainly(model, tokens(1).requires_grad_(), 1))
            outer.backward()
            if not recompute:
                losses.pop().backward()
            del outer
            assert not losses
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert all(map(torch.equal, run(recompute=True), run(recompute=False)))


def test_a_hook_of_the_first_node_of_a_forward_recomputes_that_forward() -> None:
    """Nothing encloses it: its micro-batch is told by the node's number, that of the end before it."""
    model = ToyModel()
    routes = foreign(2)
    shown = []
    forward = model.forward
    router = model.layers[0].router

    def hooked(hidden: torch.Tensor) -> torch.Tensor:
        first = hidden * 1
        first.register_hook(lambda grad: shown.append(router(hidden.detach())[1]))
        return forward(first)

    model.forward = hooked
    with npu_replay.replay(model, routes):
        outputs = [model(tokens(seed).requires_grad_()) for seed in range(2)]
        for number in (1, 0):
            outputs[number].sum().backward()
            assert torch.equal(shown.pop(), routes[number].layer_ids(0).long())
    # What a row without a route chose wasn't kept, as nothing around the forward said that it may run again.
    holes = [foreign(2)[0], foreign(2, recorded=torch.arange(ROWS) != 3)[1]]
    words = r"micro-batch 1, layer 0: .*not foreseen"
    with pytest.raises(RecomputeError, match=words), npu_replay.replay(model, holes):
        outputs = [model(tokens(seed).requires_grad_()) for seed in range(2)]
        outputs[0].sum().backward()
        outputs[1].sum().backward()
    assert len(shown) == 1


# Any of them in any other


def selective(run: Run) -> Run:
    kept = {torch.ops.aten.scatter.src, torch.ops.aten.gather.default, torch.ops.aten.mm.default}

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda x: checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def under(hooks: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Run], Run]:
    def wrap(run: Run) -> Run:
        def within(x: torch.Tensor) -> torch.Tensor:
            with hooks():
                return run(x)

        return within

    return wrap


WRAPS: list[Callable[[Run], Run]] = [
    lambda run: lambda x: checkpoint(run, x, use_reentrant=True),
    lambda run: lambda x: checkpoint(run, x, use_reentrant=False),
    lambda run: lambda x: Rerun.apply(run, x),
    lambda run: lambda x: Wrapped.apply(run, x),
    selective,
    *map(under, HOOKS.values()),
]


@pytest.mark.choice(every=3)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.usefixtures("either_torch")
def test_any_of_them_in_any_other(seed: int) -> None:
    """Around each layer, around the model and around the loss, none to two of them, in any order."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    order = rng.choice(["sum", "each"])
    early_stop = rng.random() < 0.8
    inner, middle, outer = ([rng.choice(WRAPS) for _ in range(rng.randint(0, 2))] for _ in range(3))

    def nested(run: Run, wraps: list[Callable[[Run], Run]]) -> Run:
        return functools.reduce(lambda wrapped, wrap: wrap(wrapped), wraps, run)

    def loss(model: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
        whole = nested(model, middle)
        return nested(lambda x: plainly(whole, x, seed), outer)(x)

    expected = gradients(kind, ToyModel(Drifting(), Drifting()), plainly, order)
    model = ToyModel(Drifting(), Drifting())
    for layer in model.layers:
        layer.forward = nested(layer.forward, inner)
    with set_checkpoint_early_stop(early_stop):
        actual = gradients(kind, model, loss, order)
    close(actual, expected)


# Exceptions, interrupts, and forwards in forwards


def test_a_recompute_of_a_forward_that_raised_is_nobodys() -> None:
    """Its number is that of the next one, and its routes are not."""
    for retried in (False, True):
        model = ToyModel(Drifting(), Drifting(), recompute="non-reentrant")
        kept: list[torch.Tensor] = []
        keeping = model.layers[0].register_forward_hook(lambda *args, kept=kept: kept.append(args[2]))
        with npu_replay.record(model):
            handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(tokens(0).requires_grad_())
            handle.remove(), keeping.remove()
            if retried:
                model(tokens(1).requires_grad_())
            with pytest.raises(RecomputeError, match="no forward of this block"):
                kept[0].sum().backward()
            if not retried:
                model(tokens(1).requires_grad_())
            kept.clear()


def test_grad_that_is_turned_on_inside_the_model_is_seen() -> None:
    model = ToyModel(recompute="reentrant")
    forward = model.forward
    model.forward = lambda x: torch.enable_grad()(forward)(x)
    early = pytest.raises(RecomputeError, match="the block ended before 2 router calls")
    with early, npu_replay.record(model), torch.no_grad():
        kept = model(tokens().requires_grad_())
    assert kept.requires_grad
