"""The planner, held against worked-out figures."""

from __future__ import annotations

from benchmarks.delivery_plan import plan
from npu_replay import DecoderLayers, ParallelLayout

QWEN3_235B = DecoderLayers(94, first_stage=11, last_stage=11)
LARGE = ParallelLayout(tp=4, cp=2, pp=8, dp=4, decoder=QWEN3_235B)


def test_the_figures_of_a_large_job() -> None:
    """94 layers, top-8, 512 x 16 samples of 8k tokens, 256 ranks, 8 a node: worked out by hand."""
    found = plan(LARGE, [8192] * 8192, topk=8, num_experts=128, rollout_nodes=32)
    assert (found.ranks, found.nodes) == (256, 32)
    assert found.unique == 94 * 8 * 8192 * 8192 == 50_465_865_728
    # A quarter of the batch, twice the bytes, to each of 32 nodes, three times.
    assert found.today.sent == 3 * 32 * 2 * found.unique // 4
    assert round(found.today.sent / 3e9) == 807
    assert 8 * found.today.own.max() == 4 * found.unique  # 202 GB; its store has a ninth copy
    assert found.today.node_held.max() == 9 * found.unique // 2
    flags = 8192 * 8192
    assert found.whole.sent == 8 * (found.unique + flags)
    assert found.once.sent == found.unique + 8 * flags
    assert found.once.node_held.max() == 12 * found.unique // 94 // 4 + flags // 4
    assert found.once.reads.max() == 8192 // 4
    # The marks in verl's batches: two bytes a token, a quarter of them to each node, twice.
    assert found.marks.collected == 2 * flags
    assert found.marks.sent == 2 * 32 * 2 * flags // 4
