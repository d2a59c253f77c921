"""Where `place` puts ids, against the tokens that released code has them chosen for.

Each token has a number of its own, which released code pads, splits and gathers. No rule of ours is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_replay.compat.vllm_ascend.placing import Layout, place
from on_vllm_ascend.conftest import release
from on_vllm_ascend.paths import NEW
from on_vllm_ascend.released_prepare import PREPARES, Comm, Prepared, Release, Step, tags

FOLDER = Path(__file__).parents[2] / ".work" / "vllm-ascend"
if not release():
    pytest.skip("no vllm-ascend on PYTHONPATH: ci/vllm_ascend.sh fetches it", allow_module_level=True)
pytestmark = pytest.mark.vllm_ascend

HERE = Release(FOLDER / release())
TP = (1, 2, 3, 4)
# The tokens of each data-parallel rank: fewer than ranks, a multiple of them or not; equal, or either longer.
BATCHES = ((13,), (3,), (1,), (8,), (13, 9), (9, 13), (8, 8), (2, 11), (1, 5, 12))
WAYS: dict[str, dict[str, bool]] = {"whole": {}, "sharded": {"sharded": True}, "kept": {"keeps_all": True}}
"""How tokens come into a layer, as arguments of Step."""


def cases() -> Iterator[object]:
    for comm, way in itertools.product(PREPARES, WAYS):
        if way != "kept" or HERE.keeps_all:
            yield pytest.param(comm, way, id=f"{comm}-{way}")


def written(step: Step, rank: tuple[int, int], prepared: Prepared) -> torch.Tensor:
    """The rows of a rank's batch after what it chose was put where `place` says; 0 where nothing was."""
    dp, tp = rank
    layout = Layout(
        comm=step.comm,
        tokens=step.tokens[dp],
        entered=prepared.entered,
        sharded=step.sharded,
        keeps_all=step.keeps_all,
        tp_rank=tp,
        tp_size=step.tp,
        dp_rank=dp,
        across_dp=step.tokens if len(step.tokens) > 1 else (),
    )
    first, tokens, row = place(layout, len(prepared.tags))
    rows = torch.zeros(step.tokens[dp], dtype=torch.long)
    rows[row : row + tokens] = prepared.tags[first : first + tokens]
    return rows


def hold(step: Step) -> None:
    """Each token is in its own row, on one tensor-parallel rank at least; in another row is nothing."""
    rows = {rank: written(step, rank, prepared) for rank, prepared in HERE.prepare(step).items()}
    for dp, tokens in enumerate(step.tokens):
        own = tags(dp, tokens)
        of_ranks = torch.stack([rows[dp, tp] for tp in range(step.tp)])
        assert ((of_ranks == own) | (of_ranks == 0)).all(), f"{step}, data-parallel rank {dp}: {of_ranks}"
        assert (of_ranks == own).any(0).all(), f"{step}, data-parallel rank {dp} lacks rows: {of_ranks}"


@pytest.mark.parametrize(("comm", "way"), list(cases()))
def test_ids_are_placed_where_their_tokens_stand(comm: Comm, way: str) -> None:
    for tp, tokens in itertools.product(TP, BATCHES):
        if way == "sharded" and tp == 1:
            continue  # there are no parts
        hold(Step(comm, tp, tokens, **WAYS[way]))


@pytest.mark.skipif(release() != NEW, reason="the patch is the newest release's")
def test_upstreams_own_layout_patch_knows_no_batch_that_mc2_fills_up() -> None:
    """Where this fails, the newest release may place them by itself: look anew at what it does."""
    step = Step("mc2", 1, (13, 9))
    with pytest.raises(AssertionError, match="unexpected topk_ids batch dim 13"):
        HERE.capture(step)
    hold(step)
