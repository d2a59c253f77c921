"""What the first steps are held against: right rows pass, and each way to be wrong is named.

Ranks of a real process group, and vllm-ascend's own layers, are in tests/on_vllm_ascend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.placing import Comm, Layout
from npu_replay.compat.vllm_ascend.self_check import FEWEST, STEPS, Choice, SelfCheck, expected
from npu_replay.errors import ReplayError

TOKENS = 24
LAYERS = (1, 2, 4)
EXPERTS = 16
TOP_K = 3
CHOICE = Choice(TOP_K, "softmax")


def plain(layer: int, tokens: int, comm: Comm = "none") -> Layout:
    return Layout(comm=comm, tokens=tokens, entered=tokens)


def new_capture() -> Capture:
    buffer = torch.zeros(TOKENS, 6, TOP_K, dtype=torch.int32)
    return Capture(
        buffer, SelfCheck({layer: f"layer {layer}" for layer in LAYERS}, EXPERTS, None, "here"), None
    )


Broken = Callable[[int, torch.Tensor], "torch.Tensor | None"]


def run(
    capture: Capture,
    step: int,
    tokens: int = 20,
    *,
    eager: bool = True,
    broken: Broken = lambda _, ids: ids,
    layout: Callable[[int, int], Layout] = plain,
    order: tuple[int, ...] = LAYERS,
) -> bool:
    """A step whose layers choose the top-k of their logits; does the buffer have that?

    `broken` changes what a layer hands over.
    """
    drawn = torch.Generator().manual_seed(step)
    logits = {layer: torch.randn(tokens, EXPERTS, generator=drawn) for layer in LAYERS}
    chosen = {layer: logits[layer].topk(TOP_K).indices.int() for layer in LAYERS}
    capture.begin(tokens)
    for layer in order:
        capture.enter(logits[layer])
        ids = broken(layer, chosen[layer])
        if ids is not None:
            capture.take(layer, ids, CHOICE if eager else None, layout(layer, tokens))
    capture.finish()
    return all(torch.equal(capture.buffer[:tokens, layer], chosen[layer]) for layer in LAYERS)


@pytest.mark.parametrize("how", [{"eager": False}, {"tokens": FEWEST - 1}], ids=["a way of its own", "few"])
def test_layers_that_are_not_held_against_logits_are_said(
    caplog: pytest.LogCaptureFixture, how: dict[str, Any]
) -> None:
    capture = new_capture()
    assert all(run(capture, step, **how) for step in range(STEPS))
    assert "the routers' logits in 0 of them" in caplog.text
    assert f"but not of {len(LAYERS)} layers, which choose in a way of their own" in caplog.text
    assert capture.check.ground == 0
    assert not run(capture, 90, broken=forgotten)  # nothing is checked any more, and the row is zeros
    assert not capture.buffer[:, 2].any()


def forgotten(layer: int, ids: torch.Tensor) -> torch.Tensor | None:
    return None if layer == 2 else ids


def one_row_off(layer: int, ids: torch.Tensor) -> torch.Tensor:
    return ids.roll(1, 0)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"broken": forgotten}, "20 rows of layer 2 were written by no rank"),
        # 16 is the first place above the experts
        ({"broken": lambda _, ids: ids + 1}, "have an expert above 15"),
        ({"broken": lambda _, ids: ids[:, :1].expand(-1, TOP_K)}, "have one expert twice"),
        ({"broken": one_row_off}, "aren't the top-k of the router's logits"),
        # rows and logits both of the other layer: the order tells
        ({"order": LAYERS[::-1]}, r"layers chose in the order \[4, 2, 1\]"),
    ],
    ids=["forgotten", "physical", "twice", "one_row_off", "taken for each other"],
)
def test_each_break_is_named(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ReplayError, match=says):
        run(new_capture(), 0, **how)


def unknown_place(layer: int, tokens: int) -> Layout:
    """Layer 2's tokens come in a way that isn't known."""
    return Layout(comm="none", tokens=tokens, entered=13 if layer == 2 else tokens)


def test_rows_without_a_known_place_are_an_error_and_after_the_check_zeros(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error comes once all ranks are together, not in the model, where others would wait."""
    with pytest.raises(ReplayError, match="layer 2: a layer chose experts of 20 rows, and their place"):
        run(new_capture(), 0, layout=unknown_place)
    caplog.clear()
    capture = new_capture()
    for step in range(STEPS):
        run(capture, step)
    for step in range(2):
        run(capture, step, layout=unknown_place)
        assert not capture.buffer[:20, 2].any()
        assert capture.buffer[:20, 1].any()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_way_that_comes_up_later_is_looked_at_anew() -> None:
    """Steps of another size go another way: the first is taken as it is, those after it are checked."""
    capture = new_capture()
    mc2 = functools.partial(plain, comm="mc2")
    for step in range(STEPS + 2):
        run(capture, step)
    assert run(capture, 90, layout=mc2)
    assert capture.check.ground == 0
    with pytest.raises(ReplayError, match=f"in step {STEPS + 1}, .* top-k of the router's logits"):
        run(capture, 91, layout=mc2, broken=one_row_off)


def test_ranks_look_at_the_same_steps_where_one_of_them_cannot_place_rows() -> None:
    """Each looked-at step has sums over all ranks: one rank alone would wait for ever."""
    for known in (20, 13):
        capture = new_capture()
        for step in range(STEPS):
            run(capture, step)
        layout = Layout(comm="allgather", tokens=known, entered=known)
        run(capture, 90, eager=False, layout=lambda *_, layout=layout: layout)
        capture.begin(20)
        assert capture.check.ground == -1


def test_without_strict_the_routes_are_zeros(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    capture = new_capture()
    for step in range(2):
        run(capture, step, broken=forgotten)
        assert not capture.buffer[:20].any()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_group_that_sleep_mode_replaces_is_asked_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda rows, op, group: used.append(group))
    ranks = SimpleNamespace(device_group="before")
    check = SelfCheck({0: "layer 0"}, EXPERTS, ranks, "here", steps=1)
    capture = Capture(torch.zeros(TOKENS, 1, TOP_K, dtype=torch.int32), check, ranks)
    for group in ("before", "after"):
        ranks.device_group = group
        capture.begin(2)
        capture.take(0, torch.arange(2 * TOP_K).reshape(2, TOP_K), None, plain(0, 2))
        capture.finish()
    assert used == [*["before"] * 3, "after"]


def test_groups_are_chosen_first() -> None:
    scores = torch.zeros(1, 8)
    scores[0, :] = torch.tensor([9.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 1.0])
    free, _ = expected(scores, Choice(2, "sigmoid"))
    grouped, sure = expected(scores, Choice(2, "sigmoid", groups=4, kept=1))
    assert 0 in free[0].tolist()
    assert grouped[0].tolist() == [2, 3]
    assert not sure[0], "a release that takes a group's best expert would choose the first"
    near = torch.tensor([[3.0, 2.0, 3.0, 2.0 + 1e-7], [3.0, 2.0, 1.0, 0.0]])
    assert expected(near, Choice(1, "sigmoid", groups=2, kept=1))[1].tolist() == [False, True]


def test_what_a_kernel_may_round_otherwise_is_not_held_against_it() -> None:
    near = torch.tensor([[1.0, 0.5, 0.5 + 1e-7, -1.0], [1.0, 0.5, 0.25, -1.0]])
    _, sure = expected(near, Choice(2, "softmax"))
    assert sure.tolist() == [False, True]
    assert not expected(torch.full((2, 8), torch.nan), CHOICE)[1].any()
    biased, _ = expected(near, Choice(1, "sigmoid", bias=torch.tensor([0.0, 0.0, 0.0, 9.0])))
    assert biased.tolist() == [[3], [3]]


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=["no bias", "bf16", "fp32"])
def test_scores_that_are_kept_in_bfloat16_are_no_alarm(bias: torch.dtype | None) -> None:
    """As vllm-ascend's own `_native_select_experts` does: sigmoid, bias and top-k in the logits' dtype."""
    made = torch.Generator().manual_seed(7)
    logits = torch.randn(4000, 256, generator=made).bfloat16()
    added = None if bias is None else (torch.randn(256, generator=made) / 10).to(bias)
    scores = logits.sigmoid() if added is None else logits.sigmoid() + added
    ids, sure = expected(logits, Choice(8, "sigmoid", added))
    differ = (scores.topk(8).indices.sort(-1).values != ids).any(-1) & sure
    assert differ.float().mean() < 0.005
    assert sure.float().mean() > 0.3, "enough rows are left to see another layer's"


class Graph(TorchDispatchMode):
    """The copies of a forward, which are all that a device's graph keeps of what a capture does."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def replay(self) -> None:
        for to, source in self.copies:
            to.copy_(source)


def test_replays_are_checked_where_the_first_steps_all_ran_eagerly() -> None:
    """No layer tells Python anything in a replay: that nothing was told is what tells of it."""
    capture = new_capture()
    with Graph() as graph:
        for layer in LAYERS:
            capture.take(layer, torch.arange(TOP_K, dtype=torch.int32).repeat(16, 1), None, plain(layer, 16))
    assert len(graph.copies) == len(LAYERS), "a copy a layer is all that a graph has of it"
    for step in range(STEPS):
        run(capture, step)
    del graph.copies[1]
    words = f"in step {STEPS + 1}, 16 rows of layer 2 were written by no rank"
    for refused in (nullcontext(), pytest.raises(ReplayError, match=words)):  # the first is taken as it is
        capture.begin(16)
        graph.replay()
        with refused:
            capture.finish()
