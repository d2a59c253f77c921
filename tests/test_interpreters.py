"""Without asserts and docstrings, and with every warning an error, npu_replay does the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent

SCRIPT = """
import sys

import torch

import npu_replay
from npu_replay import ParallelLayout, RoutedExperts, errors, routers
from zoo.toys import EXPERTS, ToyModel, ToyRouters, tokens

def check(fine, what):  # -O drops asserts
    if not fine:
        raise SystemExit(f"wrong: {what}")

def refused(kind, act):
    try:
        act()
    except kind:
        return
    raise SystemExit(f"not refused: {kind.__name__}")

routers.register("toy", ToyRouters())
for recompute in (None, "reentrant", "non-reentrant"):
    model, x = ToyModel(recompute=recompute), tokens().requires_grad_()
    with npu_replay.record(model) as recording:
        model(x).sum().backward()
    ids = (recording.routes[0].ids.long() + 1) % EXPERTS
    routes = [RoutedExperts(ids=ids, layers=[0, 1], num_experts=EXPERTS)]
    with npu_replay.observe(model) as seen, npu_replay.replay(model, routes, live_mismatch=True) as session:
        model(x).sum().backward()
    check(torch.equal(seen.shown[0].ids.long().sort().values, ids.sort().values), "what the routers show")
    check(session.metrics()["live_mismatch"] > 0, "live_mismatch")
    def twice():
        with npu_replay.replay(model, routes):
            model(x)
            model(x)
    refused(errors.MicroBatchError, twice)
check(ParallelLayout(tp=2, tp_rank=1).tp_rank == 1, "ParallelLayout")
refused(errors.ReplayError, lambda: ParallelLayout(tp=2, tp_rank=3))
refused(errors.InvalidRoutes, lambda: RoutedExperts(ids=ids + 90, layers=[0, 1], num_experts=EXPERTS))
npu_replay.report()
"""


def test_the_blocks_and_their_errors_are_the_same() -> None:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": path}  # with a cache: to compile all of torch takes 20 s
    command = [sys.executable, "-OO", "-W", "error", "-bb", "-X", "dev", "-c", SCRIPT]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
