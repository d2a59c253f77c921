"""observe, the witness of `npu-replay smoke`, against hooks of the tests' own."""

from __future__ import annotations

import contextlib

import pytest
import torch

import npu_replay
from npu_replay.smoke.checks import differing
from toys import TOPK, ToyModel, foreign, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", ["alone", "around a record", "around a replay"])
def test_it_shows_what_a_hook_reads_off_each_forward(kind: str, recompute: str | None) -> None:
    model = ToyModel(recompute=recompute)
    read: list[list[torch.Tensor]] = [[] for _ in model.layers]
    blocks = {
        "alone": contextlib.nullcontext,
        "around a record": lambda: npu_replay.record(model),
        "around a replay": lambda: npu_replay.replay(model, foreign(2)),
    }
    with npu_replay.observe(model) as observation, blocks[kind]():
        with contextlib.ExitStack() as undo:
            for layer, seen in zip(model.layers, read, strict=True):
                hook = lambda _, __, output, seen=seen: seen.append(output[1])  # noqa: E731
                undo.callback(layer.router.register_forward_hook(hook).remove)
            outputs = [model(tokens(seed).requires_grad_()) for seed in range(2)]
        torch.stack(outputs).sum().backward()
    for number, shown in enumerate(observation.shown):
        for layer, seen in enumerate(read):
            ours, theirs = shown.ids[:, layer].long().sort().values, seen[number].sort().values
            assert torch.equal(ours, theirs)
            assert ours.shape[1] == TOPK


def test_differing_counts_the_token_layers_that_a_loop_finds() -> None:
    ours, theirs = foreign(2)
    found = sum(
        set(a.tolist()) != set(b.tolist())
        for row, other in zip(ours.ids, theirs.ids, strict=True)
        for a, b in zip(row, other, strict=True)
    )
    assert found
    assert differing([ours], [theirs]) == found
