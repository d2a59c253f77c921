"""record, replay and pin_recompute: what they refuse, where, and that they leave nothing behind.

And a block that is never entered, which does nothing, says so: `replay(...)` without `with`.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    set_checkpoint_early_stop,
)

import npu_replay
from npu_replay import RoutedExperts, TokenLayout
from npu_replay.errors import MicroBatchError, NoEffect, RecomputeError, ReplayError, RouterError
from npu_replay.seam import backward
from zoo.outcome import in_thread
from zoo.toys import (
    EXPERTS,
    ROWS,
    TOPK,
    Select,
    ToyLayer,
    ToyModel,
    ToyRouter,
    foreign,
    forwards,
    hooks,
    opened,
    recorded,
    run,
    same,
    tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("few_objects", "toy_routers"),
]

NATIVE = torch.topk, torch.Tensor.topk


def check_usable(model: ToyModel, before: object) -> None:
    """After an error nothing is left, and the model works as it did."""
    assert hooks(model) == 0
    assert (torch.topk, torch.Tensor.topk) == NATIVE
    assert same(run(model, 0), before)
    assert len(recorded(model)) == 1


# Bad models and bad loops: refused where it is told


def by_sorting(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = scores.sort(dim=-1, descending=True)
    return values[:, : router.topk], ids[:, : router.topk]


def showing_fewer(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = torch.topk(scores, router.topk, dim=-1)
    return values, torch.cat([ids[:, :1], ids[:, :-1]], dim=1)


def in_axes(*axes: int) -> Select:
    def select(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.topk(scores.unflatten(0, axes), k=router.topk, dim=-1)
        return values.flatten(0, -2), ids.flatten(0, -2)

    return select


def with_a_shared_layer() -> ToyModel:
    """T34: the second sequence would overwrite the first."""
    layer = ToyLayer(ToyRouter())
    return ToyModel(layer, layer)


def chunk(*numbers: int | None) -> ToyModel:
    return ToyModel(*(ToyRouter(layer=number) for number in numbers))


def once(model: Any) -> object:
    return model(tokens())


def of(select: Select, **about: Any) -> Callable[[], ToyModel]:
    return lambda: ToyModel(ToyRouter(), ToyRouter(select=select, **about))


def in_its_own_forward(model: ToyModel) -> None:
    handle = model.layers[1].register_forward_hook(lambda *_: (handle.remove(), once(model), None)[2])
    once(model)


Refused = tuple[Callable[[], Any], Callable[[Any], object], type[ReplayError], str]
REFUSED: dict[str, Refused] = {
    "no router": (lambda: nn.Linear(2, 2), once, RouterError, r"Linear.*no router.*toy"),
    "a layer twice": (lambda: chunk(3, 3), once, RouterError, "layer 3.*two routers.*layers.0.*layers.1"),
    "a layer unknown": (lambda: chunk(3, None), once, RouterError, "layers.1.*some don't.*1 of 2"),
    "a chunk twice": (lambda: [chunk(0)] * 2, once, RouterError, "layer 0.*two routers"),
    "nothing ran": (ToyModel, lambda model: None, MicroBatchError, "nothing ran"),
    "no top-k": (
        of(by_sorting, bypass="why its kind has none"),
        once,
        NoEffect,
        "micro-batch 0, layer 1.*never reached its top-k.*why its kind has none",
    ),
    "no top-k, and its kind doesn't know why": (
        of(by_sorting),
        once,
        NoEffect,
        "(?s)layer 1.*never reached its top-k.*npu_moe_gating_top_k.*moe_router_fusion=False",
    ),
    "three axes": (
        of(in_axes(2, 5)),
        once,
        NoEffect,
        r"(?s)layer 1.*never.*axes.*scores\.flatten\(0, -2\)",
    ),
    "fewer experts": (of(showing_fewer), once, NoEffect, "doesn't show the chosen experts"),
    "a shared layer": (
        with_a_shared_layer,
        once,
        MicroBatchError,
        "layer 0.*called again.*a looped model.*layers that share one router",
    ),
    "past its call": (  # S1: it has no end, so every micro-batch would be number 0
        ToyModel,
        lambda model: (model.forward(tokens()), model.forward(tokens())),
        MicroBatchError,
        "micro-batch 0, layer 0.*past the __call__",
    ),
    "chunks apart": (
        lambda: [chunk(0), chunk(1)],
        lambda chunks: (once(chunks[0]), once(chunks[1]), once(chunks[0])),
        MicroBatchError,
        r"different numbers.*\[2, 1\]",
    ),
    "inside itself": (ToyModel, in_its_own_forward, MicroBatchError, "called inside its own forward"),
    "under vmap": (
        ToyModel,
        lambda model: torch.vmap(model)(torch.stack([tokens(), tokens(1)])),
        RouterError,
        "layer 0.*vmap.*torch.vmap",
    ),
}


@pytest.mark.parametrize("kind", ["record", "pin_recompute"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(what: str, kind: str) -> None:
    make, act, error, words = REFUSED[what]
    model = make()
    with pytest.raises(error, match=words), opened(kind, model):
        act(model)
    assert hooks(nn.ModuleList(model if isinstance(model, list) else [model])) == 0


# Bad input: refused on entering


@pytest.mark.parametrize(
    ("ids", "layers", "experts", "words"),
    [
        (torch.arange(3).expand(ROWS, 1, 3), [0], EXPERTS, "layer 1.*missing.*0, 1.*got .0"),
        (torch.arange(2).expand(ROWS, 2, 2), [0, 1], EXPERTS, "layer 0.*another top-k.*top-3.*top-2"),
        (torch.arange(3).expand(ROWS, 2, 3), [0, 1], 8, "layer 0.*number of experts.*top-3 of 16.*of 8"),
    ],
)
def test_routes_of_another_model_are_refused_on_entering(
    ids: torch.Tensor, layers: list[int], experts: int, words: str
) -> None:
    model = ToyModel()
    before = run(model, 0)
    routes = RoutedExperts(ids=ids, layers=layers, num_experts=experts)
    message = f"micro-batch 0, {words}"
    with pytest.raises(RouterError, match=message), npu_replay.replay(model, [routes]):
        pytest.fail("the block was entered")
    check_usable(model, before)


@pytest.mark.parametrize("outer", ["record", "replay", "pin_recompute"])
@pytest.mark.parametrize("inner", ["record", "replay", "pin_recompute"])
def test_blocks_on_the_same_router_do_not_nest(outer: str, inner: str) -> None:
    model = ToyModel()
    before = run(model, 0)
    with opened(outer, model):
        count = hooks(model)
        message = f"layer 0.*{inner} can't be opened inside {outer}"
        with pytest.raises(RouterError, match=message), opened(inner, model):
            pytest.fail("the block was entered")
        assert hooks(model) == count, "the outer block is as it was"
        model(tokens())
    check_usable(model, before)


# Bad input: refused in the offending forward


def test_one_micro_batch_too_many_or_too_few_is_refused() -> None:
    model = ToyModel()
    before = run(model, 0)
    words = r"(?s)micro-batch 1.*more micro-batches.*without `with` and never left"
    many = pytest.raises(MicroBatchError, match=words)
    with many, npu_replay.replay(model, recorded(model)):
        model(tokens(0))
        model(tokens(1))
    few = pytest.raises(MicroBatchError, match=r"micro-batch 1.*fewer micro-batches.*Expected 2.*got 1")
    with few, npu_replay.replay(model, recorded(model, 0, 1)):
        model(tokens(0))
    check_usable(model, before)


def sorted_with_grad(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As Megatron-core does from 0.18 on."""
    return torch.topk(scores, router.topk, dim=-1, sorted=torch.is_grad_enabled())


@pytest.mark.parametrize("opens", [npu_replay.record, npu_replay.pin_recompute])
def test_a_recompute_sorts_what_its_forward_left_unsorted(opens: Any) -> None:
    model = ToyModel(*(ToyRouter(select=sorted_with_grad) for _ in range(2)), recompute="reentrant")
    for layer in model.layers:
        layer.router.topk = 4
    plain = run(model, 0, 1)
    with opens(model):
        assert same(run(model, 0, 1), plain)


def test_forwards_from_two_threads_are_refused() -> None:
    model = ToyModel()
    with npu_replay.record(model):
        model(tokens())
        with pytest.raises(MicroBatchError, match="two threads"):
            in_thread(lambda: model(tokens()))


def test_routes_are_there_only_when_the_block_has_ended() -> None:
    model = ToyModel()
    recording = npu_replay.record(model)
    with recording:
        model(tokens())
        with pytest.raises(
            ReplayError, match=r"complete when.*got Recording\(open on 2 routers, 1 micro-batches\)"
        ):
            _ = recording.routes
    assert len(recording.routes) == 1
    with pytest.raises(ReplayError, match="entered before"), recording:
        pass


# Recompute


RECOMPUTE = ["reentrant", "non-reentrant"]


@pytest.mark.choice
@pytest.mark.parametrize("kind", ["record", "replay", "pin_recompute"])
@pytest.mark.parametrize("how", [*RECOMPUTE, "whole reentrant", "whole non-reentrant"])
def test_leaving_the_block_before_backward_is_an_error(how: str, kind: str) -> None:
    """S1: the recompute after the block would choose anew, in silence."""
    model = ToyModel(recompute=None if "whole" in how else how)
    before = run(model, 0)
    x = tokens().requires_grad_()
    early = pytest.raises(RecomputeError, match=r"micro-batch 0, layer 0.*2 router calls.*inside.*`del loss`")
    with early, opened(kind, model):
        if "whole" in how:
            loss = checkpoint(model, x, use_reentrant=how == "whole reentrant").sum()
        else:
            loss = model(x).sum()
    del loss
    check_usable(model, before)


def test_a_torch_that_hides_its_autograd_facts_refuses_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails there is named: a package that torch imports for a checkpoint may be broken, and that is no
    fault of torch's."""

    def broken(*_: Any, **__: Any) -> None:
        raise ImportError("no symbol _ZN in libtriton.so")

    model = ToyModel(recompute="reentrant")
    monkeypatch.setattr(backward, "checkpoint", broken)
    monkeypatch.setattr(backward, "probe", backward.probe.__wrapped__)
    words = rf"layer 1.*ImportError: no symbol _ZN in libtriton\.so, raised in {__file__}, line \d+\).*turn"
    with npu_replay.record(model):
        with pytest.raises(RecomputeError, match=words):
            run(model, 0)
        gc.collect()


@pytest.mark.parametrize("how", RECOMPUTE)
def test_a_second_backward_recomputes_again(how: str) -> None:
    grads = []
    for model in (ToyModel(), ToyModel(recompute=how)):
        with npu_replay.replay(model, foreign()):
            loss = model(tokens().requires_grad_()).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("kind", ["pin_recompute", "replay"])
@pytest.mark.parametrize("how", [None, *RECOMPUTE])
def test_little_is_held_where_a_graph_is_always_in_flight(how: str | None, kind: str) -> None:
    """As in a pipeline: a backward comes two forwards after its own. All ids would be a GB on the device."""
    model = ToyModel(recompute=how)
    counts = []
    with opened(kind, model, 30, recorded=torch.arange(ROWS) % 2 == 0):
        losses: list[torch.Tensor] = []
        for seed in range(30):
            losses.append(model(tokens(seed).requires_grad_()).square().mean())
            if len(losses) > 2:
                losses.pop(0).backward()
            counts.append(sum(isinstance(value, torch.Tensor) for value in gc.get_objects()))
        for loss in losses:
            loss.backward()
    assert max(counts[20:]) <= max(counts[5:20])


@pytest.mark.parametrize("usable", [True, False])
def test_padding_is_counted_apart_from_what_is_missing(usable: bool) -> None:
    model = ToyModel()
    batch = recorded(model, 0)[0].take(range(ROWS - 4))
    layout = TokenLayout.padded([ROWS - 3], ROWS)  # the last token has no route, and three rows no token
    if not usable:
        batch = RoutedExperts.unrecorded(ROWS - 3, layers=[0, 1], topk=TOPK, num_experts=EXPERTS)
    routes = layout.gather([batch], on_bad_route="native", ceiling=1)
    with npu_replay.replay(model, [routes], live_mismatch=True) as session:
        model(tokens(0))
    metrics = session.metrics()
    assert (metrics["rows_without_route"], metrics["padding"]) == ((4, 3) if usable else (ROWS, 3))
    assert metrics["bad_samples"] == (not usable)
    counted = [session.counts()[name] for name in ("differing", "compared")]
    assert counted == [0, 2 * (ROWS - 4) * usable], "rows without a route don't count"


# What reaches past the model's __call__


class Logged(TorchDispatchMode):
    """What reaches the dispatcher, as a selective checkpoint's own modes see it."""

    names: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.choice
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("kind", ["record", "replay", "replay with holes", "live mismatch", "pin_recompute"])
@pytest.mark.parametrize("number", [0, 3], ids=["checked", "unchecked"])
def test_no_mode_of_anybodys_sees_our_own_operations(number: int, kind: str, drops: bool) -> None:
    """A policy that keeps each second scatter would keep another one in the recompute than in the forward."""
    model = ToyModel(ToyRouter(drops=drops), ToyRouter(drops=drops, masks=True))
    recorded = torch.arange(ROWS) % 2 == 0 if kind == "replay with holes" else None
    if kind == "live mismatch":
        block = npu_replay.replay(model, foreign(number + 1), live_mismatch=True)
    else:
        block = opened(kind.partition(" ")[0], model, number + 1, recorded=recorded)
    passes: list[list[str]] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        watching = Logged()
        watching.names = []
        passes.append(watching.names)
        with watching:
            return model(x)

    def checkpointed() -> torch.Tensor:
        x = tokens().requires_grad_()
        return checkpoint(watched, x, use_reentrant=False).square().mean()

    with block, set_checkpoint_early_stop(False):
        forwards(model, *range(number))
        checkpointed().backward()
    checkpointed()
    # The checkpoint itself detaches in its recompute; a gather is what a top-k is answered with.
    forward, again, untouched = ([name for name in names if "detach" not in name] for names in passes)
    assert forward == again
    answered = [name.replace("topk", "gather") for name in untouched]
    assert [name for name in forward if "topk" not in name] == answered


# Copies of the model, and what is held

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
BLOCKS = ["record", "replay", "pin_recompute", "observe"]


@pytest.mark.choice
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_inside_a_block_is_a_plain_model(how: str, kind: str) -> None:
    model = ToyModel()
    expected = model(tokens(3))
    block = opened(kind, model)
    with block:
        model(tokens())
        twin = COPIES[how](model)
        assert b"npu_replay" not in pickle.dumps(model), "who loads it needs nothing of ours"
        assert torch.equal(twin(tokens(3)), expected)
    alive = weakref.ref(model), weakref.ref(block)
    assert hooks(model) == 0
    del model, block
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert torch.equal(twin(tokens(3)), expected)
    assert len(recorded(twin)) == 1


@pytest.mark.choice
@pytest.mark.parametrize("how", [None, *RECOMPUTE])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_no_garbage_that_waits_for_the_collector(kind: str, how: str | None) -> None:
    """Megatron's --manual-gc: a cycle would keep each step's routes in host memory."""
    model = ToyModel(recompute=how)
    with opened(kind, model):  # the first recompute of a process is probed for
        run(model, 0)
    gc.collect()
    gc.disable()
    try:
        block = opened(kind, model)
        with block:
            run(model, 0)
        alive = weakref.ref(block)
        del block
        assert alive() is None
    finally:
        gc.enable()


# Odd but legitimate use


@pytest.mark.parametrize("kind", ["record", "observe", "pin_recompute"])
def test_more_experts_than_ids_are_kept_for_are_refused_on_entering(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.toys.EXPERTS", 40_000)
    with pytest.raises(RouterError, match=r"more experts.*32767.*40000"), opened(kind, ToyModel()):
        pass


def test_a_step_that_diverged_is_not_reported_as_ours() -> None:
    model = ToyModel()
    with npu_replay.record(model):
        output = model(tokens() * float("nan"))
    assert bool(output.isnan().all())


@pytest.mark.parametrize("how", RECOMPUTE)
def test_a_graph_in_a_cycle_of_garbage_needs_no_backward(how: str) -> None:
    model = ToyModel(recompute=how)
    with npu_replay.record(model):
        cycle: list[object] = [model(tokens().requires_grad_())]
        cycle.append(cycle)
        del cycle


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (True, "in backward.*by no node of the model's graph.*gradient hook"),
        (False, "micro-batch 0, layer 0.*another number of tokens.*Expected 10 rows, got 7"),
    ],
)
def test_a_forward_in_a_gradient_hook_is_not_taken_for_a_recompute(leaf: bool, words: str) -> None:
    model = ToyModel()
    x = tokens().requires_grad_()
    with npu_replay.replay(model, foreign()):
        hooked = x if leaf else x * 1
        loss = model(hooked).sum()
        hooked.register_hook(lambda grad: model(tokens(1, rows=7)).sum() * 0 + grad)
        with pytest.raises(RecomputeError, match=words):
            loss.backward()


def test_observe_is_never_empty_in_silence() -> None:
    model = ToyModel()
    with pytest.raises(MicroBatchError, match="not through the __call__"), npu_replay.observe(model):
        model.layers[0](tokens())
    model.layers[1].forward = lambda hidden: hidden
    with pytest.raises(NoEffect, match=r"micro-batch 0, layer 1.*not called"), npu_replay.observe(model):
        model(tokens())
    block = npu_replay.observe(ToyModel())
    with pytest.raises(ReplayError, match="complete when"):
        _ = block.shown


@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, *RECOMPUTE])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 3], ids=["", "other rows"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("block", ["record", "replay", "pin_recompute", "observe"])
def test_a_block_on_a_wrapper_whose_module_is_called_says_so(
    block: str, times: int, rows: int, recompute: str | None
) -> None:
    wrapper = nn.Sequential(ToyModel(recompute=recompute))
    arguments = (foreign(2),) if block == "replay" else ()
    wrong = pytest.raises(ReplayError, match="given a wrapper, and the loop calls the module inside it")
    with wrong, getattr(npu_replay, block)(wrapper, *arguments):
        for seed in range(times):
            wrapper[0](tokens(seed, rows).requires_grad_()).sum().backward()


def test_other_rows_than_the_routes_have_are_refused_with_their_usual_causes() -> None:
    model = ToyModel()
    routes = recorded(model, 0, 1)
    causes = [
        "the update cuts",
        "micro-batches in another order",
        "several sequences, padding",
        "the routes are of",
    ]
    causes += ["a micro-batch before", "an evaluation"]
    wrong = pytest.raises(MicroBatchError, match=r"first:\n- " + r".*\n- ".join(causes))
    with wrong, npu_replay.replay(model, routes):
        model(tokens(0)).sum().backward()
        model(tokens(1, ROWS - 3))


@pytest.mark.parametrize("kind", ["record", "replay", "observe"])
@pytest.mark.parametrize("how", [None, "reentrant"])
def test_an_ended_block_keeps_its_results_alone(how: str | None, kind: str) -> None:
    """A loop keeps the recording through the update: ids beside its routes would stay on the device."""
    model = ToyModel(recompute=how)
    with opened(kind, model, 5) as session:
        for seed in range(5):
            model(tokens(seed).requires_grad_()).sum().backward()
    results = [getattr(session, name) for name in ("routes", "shown") if hasattr(session, name)]

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())

    before = tensors()
    session = None
    of_the_routes = (
        0 if results else 2 * 5
    )  # a replay has its routes until it goes: ids and which are recorded
    assert before - tensors() <= of_the_routes


# Never entered


OPENS: dict[str, Callable[[ToyModel], Any]] = {
    "record": npu_replay.record,
    "replay": lambda model: npu_replay.replay(model, recorded(model)),
    "pin_recompute": npu_replay.pin_recompute,
    "observe": npu_replay.observe,
    "follow": npu_replay.follow,
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", [kind for kind in OPENS if kind != "observe"])
@pytest.mark.parametrize("figures", ["metrics", "counts"])
def test_the_figures_of_a_block_that_was_never_entered_are_an_error(figures: str, kind: str) -> None:
    model = ToyModel()
    session = OPENS[kind](model)
    model(tokens()).sum().backward()
    with pytest.raises(
        ReplayError, match=rf"the {kind} block was never entered\. Expected with \.\.\. as session"
    ):
        getattr(session, figures)()


@pytest.mark.parametrize("kind", OPENS)
def test_a_block_that_is_dropped_before_it_was_entered_warns_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = ToyModel()
    session = OPENS[kind](model)
    model(tokens())
    assert not warnings(caplog)
    del session
    (text,) = warnings(caplog)
    assert text.startswith(f"[npu_replay] {kind}() was called, but its block was never entered")
    assert f"with npu_replay.{kind}(...):" in text


@pytest.mark.parametrize("kind", OPENS)
def test_an_open_block_that_nobody_keeps_ends_at_once_and_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not some time later, when the collector runs."""
    model = ToyModel()
    block = OPENS[kind](model)
    gc.collect()
    caplog.clear()
    gc.disable()
    try:
        block.__enter__()
        assert hooks(model)
        del block
        assert not hooks(model)
    finally:
        gc.enable()
    assert [warning for warning in warnings(caplog) if f"an open {kind}() was dropped" in warning]


SCRIPT = """
import logging
import npu_replay
from npu_replay import routers
from zoo.toys import ToyModel, ToyRouters, tokens

routers.register("toy", ToyRouters())
model = ToyModel()
with npu_replay.record(model) as recording:
    model(tokens())
session = npu_replay.replay(model, recording.routes)
model.itself = [model, session]  # a cycle that nobody collects
model(tokens())
"""


@pytest.mark.slow
@pytest.mark.choice(every=3)
@pytest.mark.parametrize("end", ["raise KeyError('theirs')", "", "raise SystemExit(3)"])
def test_one_that_lives_until_the_process_ends_warns_then(end: str) -> None:
    path = [str(Path(__file__).parents[1]), str(Path(npu_replay.__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {path!r}\n" + textwrap.dedent(SCRIPT) + end
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == {"": 0, "raise SystemExit(3)": 3}.get(end, 1)
    assert ran.stderr.count("replay() was called, but its block was never entered") == 1
    assert ran.stderr.count("Traceback") == ("KeyError" in end), ran.stderr
