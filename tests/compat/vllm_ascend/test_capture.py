"""A worker's capture: what the first steps are held against, and both ends of a step, on objects that have a
runner's and a capturer's names.

Ranks of a real process group, and vllm-ascend's own layers and runner, are in tests/on_vllm_ascend; vLLM's
own runner is in tests/live.
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

from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.placing import Comm, Layout
from npu_replay.compat.vllm_ascend.read_out import ReadOut
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


def run(
    capture: Capture,
    step: int,
    tokens: int = 20,
    *,
    eager: bool = True,
    broken: Callable[[int, torch.Tensor], torch.Tensor | None] = lambda _, ids: ids,
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


# ---- both ends of a step


STEP = 6
"""Tokens of a step of these runners."""
GROUP = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))


class Runner:
    """One layer that routes, one of two experts chosen; `slots` by KV cache group."""

    def __init__(self, **more: Any) -> None:
        self.scheduler_config = SimpleNamespace(async_scheduling=False)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[GROUP])
        self.kept: list[list[int]] = []
        self.__dict__ |= more

    def execute_model(self, scheduled: Any, dummy_run: bool = False) -> None:
        tokens = scheduled.total_num_scheduled_tokens
        ids = torch.ones(tokens, 1, dtype=torch.int32)
        self.capture.take(0, ids, None, Layout(comm="none", tokens=tokens, entered=tokens))

    def install(self, capturer: Any = None) -> Any:
        """Install it; returns the capturer, by itself that of the releases to 0.20.2."""
        if capturer is None:
            capturer = SimpleNamespace(save_captured_experts=lambda indices: self.kept.append([*indices]))
        self.capture = Capture(
            torch.zeros(32, 1, 1, dtype=torch.int32), SelfCheck({0: "layer 0"}, 2, None, "here"), None
        )
        self.patches = Patches("a test")
        ReadOut(self, capturer, self.capture).install(self.patches)
        return capturer


def scheduled_step(tokens: int = STEP, done: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"one": tokens},
        scheduled_new_reqs=[SimpleNamespace(req_id="one", num_computed_tokens=done)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )


def test_slots_that_fill_up_a_graph_are_cut_off() -> None:
    """To 0.20.2: they are -1, which numpy takes for the cache's last slot."""
    runner = Runner()
    capturer = runner.install()
    runner.execute_model(scheduled_step())
    capturer.save_captured_experts(indices=[*range(32, 32 + STEP), -1, -1])
    assert runner.kept == [list(range(32, 32 + STEP))]
    runner.execute_model(scheduled_step(2), dummy_run=True)  # which begins nothing
    assert runner.capture.scheduled == STEP


@pytest.mark.parametrize(
    "change",
    [lambda slot: slot + 1, lambda slot: 32, lambda slot: slot - 64],
    ids=["one further", "all the same", "below zero"],
)
def test_slots_of_other_tokens_are_an_error_and_without_strict_give_zeros(
    change: Callable[[int], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner()
    capturer = runner.install()
    runner.execute_model(scheduled_step(done=3))
    with pytest.raises(ReplayError, match="the slots of step 1 aren't those of its tokens"):
        capturer.save_captured_experts([change(slot) for slot in range(35, 35 + STEP)])
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    runner = Runner()
    capturer = runner.install()
    for done in (3, 9):
        runner.execute_model(scheduled_step(done=done))
        capturer.save_captured_experts([change(slot) for slot in range(32 + done, 32 + done + STEP)])
        assert not runner.capture.buffer.any()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the slots of step 1 aren't those of its tokens" in caplog.text


def test_drafts_that_were_rejected_a_step_ago_leave_slots_unchecked() -> None:
    """The scheduler counts them still, under asynchronous scheduling."""
    runner = Runner(speculative_config=object(), scheduler_config=SimpleNamespace(async_scheduling=True))
    capturer = runner.install()
    runner.execute_model(scheduled_step(done=3))
    capturer.save_captured_experts(list(range(32, 32 + STEP)))
    assert len(runner.kept) == 1


def test_a_hybrid_models_slots_are_those_of_its_attention() -> None:
    """0.22 to 0.29: the runner keeps those of group 0, which may be a state's."""
    tables = [
        SimpleNamespace(slot_mapping=SimpleNamespace(gpu=torch.arange(first, first + 16)))
        for first in (9, 32)
    ]

    def _build_attention_metadata() -> str:
        runner.routed_experts_slot_mapping_device[:8].copy_(tables[0].slot_mapping.gpu[:8])
        return "made"

    runner: Any = Runner(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[GROUP, GROUP]),
        routed_experts_attn_gid=1,
        routed_experts_slot_mapping_device=torch.zeros(16, dtype=torch.int64),
        input_batch=SimpleNamespace(block_table=tables),
        _build_attention_metadata=_build_attention_metadata,
    )
    capturer = SimpleNamespace(get_device_buffer=lambda: runner.capture.buffer, clear_buffer=lambda: None)
    runner.install(capturer)
    runner.execute_model(scheduled_step())
    assert runner._build_attention_metadata() == "made"
    assert runner.routed_experts_slot_mapping_device[:STEP].tolist() == list(range(32, 32 + STEP))
    assert capturer.get_device_buffer()[:STEP, 0, 0].tolist() == [1] * STEP
    runner.patches.undo()
    assert runner._build_attention_metadata is _build_attention_metadata


def test_what_gives_no_right_slots_is_refused() -> None:
    """To 0.20.2 vLLM keeps the first group's: those of a sliding window are given back meanwhile."""
    with pytest.raises(ReplayError, match="2 groups: SimpleNamespace, SimpleNamespace"):
        Runner(kv_cache_config=SimpleNamespace(kv_cache_groups=[GROUP, GROUP])).install()


def test_drafts_that_vllm_leaves_out_of_a_step_are_not_missed() -> None:
    """From 0.28 on with adaptive verification, fewer tokens run than are scheduled."""
    ran = STEP - 2
    runner: Any = Runner()
    runner.execute_model = lambda scheduled: Runner.execute_model(runner, scheduled_step(ran))
    capturer = SimpleNamespace(attn_gid=0, get_routed_experts=lambda slots, tokens: tokens)
    runner.install(capturer)
    runner.execute_model(scheduled_step())
    assert capturer.get_routed_experts([torch.arange(32, 64)], ran) == ran
    assert runner.capture.buffer[:ran, 0, 0].tolist() == [1] * ran
