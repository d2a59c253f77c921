"""observe, the witness of `npu-replay smoke`, against hooks of the tests' own."""

from __future__ import annotations

import contextlib

import pytest
import torch

import npu_replay
from npu_replay import RoutedExperts
from zoo.toys import ROWS, TOPK, ToyModel, ToyRouter, foreign, plain, tokens

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
            ours = shown.ids[:, layer].long().sort().values
            theirs = seen[number].sort().values
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
    assert npu_replay.compare(ours, theirs).differing == found


def dropping(rows: list[int]) -> ToyModel:
    """A model whose first layer drops the last expert of these rows, as over a capacity."""

    def select(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = plain(router, scores)
        ids = ids.clone()
        ids[rows, -1] = ids[rows, 0]
        return values, ids

    return ToyModel(ToyRouter(0, select=select), ToyRouter(1))


def seen(model: ToyModel, *seeds: int) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.observe(model) as observation:
        for seed in seeds:
            model(tokens(seed))
    return observation.shown


def test_dropped_experts_are_missing_from_what_compare_takes() -> None:
    """Rows with a dropped expert were left out on both sides: 0.0 where other experts ran."""
    whole, some, others = (seen(dropping(rows), 0, 1) for rows in ([], [2, 5], [5, 7]))
    assert npu_replay.compare(whole, whole).differing == 0
    for one in (some, some[0]):  # what was dropped in both is the same
        assert npu_replay.compare(one, one).differing == 0
    found = npu_replay.compare(some, whole)
    # Two rows of each micro-batch in the first layer; the other layer's inputs change with them.
    assert (round(found.layer_mismatch[0], 6), found.token_layers) == (0.2, 2 * 2 * ROWS)
    assert npu_replay.compare(some, others).layer_mismatch[0] == pytest.approx(0.2)
    first = [one.only([0]) for one in some]
    assert npu_replay.compare(first, whole).differing == 4
    assert npu_replay.compare(some[0], whole[0]).differing >= 2
    assert not some[0].recorded[[2, 5]].any()  # they can't be replayed
    assert int(some[0].recorded.sum()) == ROWS - 2
