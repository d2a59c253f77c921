"""Megatron-core on an accelerator, in one process: the CPU's routes give the CPU's losses there."""

from __future__ import annotations

import pytest
import torch

import npu_replay
from benchmarks import cases
from benchmarks import gather as bench_gather
from benchmarks import layout as bench_layout
from benchmarks import run as bench
from zoo.gpt import VARIANTS, build, hooks, perturbed, routers, same
from zoo.outcome import random_routes

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

CASES = [
    ("softmax_after_topk", "full"),
    ("sigmoid_bias_scaling", "selective_moe"),
    ("groups_sigmoid_bias", "non_reentrant_in_reentrant"),
    ("capacity_padded", "full"),
    ("aux_loss", "layers_non_reentrant"),
]


@pytest.mark.parametrize(("variant", "recompute"), CASES)
def test_record_and_replay_are_bit_equal_and_recompute_finds_its_own(
    variant: str, recompute: str | None, device: torch.device
) -> None:
    trainer = build(VARIANTS[variant], recompute)
    assert next(trainer.model.parameters()).device.type == device.type
    untouched = trainer.run("sum")
    with npu_replay.record(trainer.model) as recording:
        assert same(trainer.run("sum"), untouched)
    with (
        perturbed(trainer.model),
        npu_replay.observe(trainer.model) as seen,
        npu_replay.replay(trainer.model, recording.routes),
    ):
        trainer.run("sum")
    if "capacity" not in variant:  # which drops some of them
        assert npu_replay.compare(seen.shown, recording.routes).differing == 0
    routes = random_routes([24] * 3, [router.label for router in routers(trainer.model)], 8, 2, seed=5)
    plain = build(VARIANTS[variant])
    with npu_replay.replay(plain.model, routes):
        expected = plain.run("sum")
    with npu_replay.replay(trainer.model, routes):
        assert same(trainer.run("sum"), expected)
    assert hooks(trainer.model) == 0


@pytest.mark.long
def test_the_bench_runs_and_names_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "TOKENS", (16,))
    monkeypatch.setattr(cases, "ROUTER", cases.ROUTER | {"hidden_size": 32})
    monkeypatch.setattr(cases, "STEP", cases.STEP | {"hidden_size": 32})
    monkeypatch.setattr(bench_gather, "SEQUENCES", 3)
    monkeypatch.setattr(bench_layout, "TOKENS", 1024)
    bench_gather.rollout.cache_clear()
    rows = bench.main(device="auto", pairs=1, out=None, force=False)
    bench_gather.rollout.cache_clear()
    assert {row.what for row in rows} == {
        "router",
        "other top-k",
        "gather",
        "decode",
        "capture",
        "import",
        "inputs",
        "overlap",
        "layout",
        "step",
    }
    module = getattr(torch, device.type)
    assert module.get_device_name() in capfd.readouterr().out
