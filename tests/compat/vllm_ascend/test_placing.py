"""Where ids belong, against tensors that are really padded, split and gathered here."""

from __future__ import annotations

import itertools

import pytest
import torch

from npu_replay.compat.vllm_ascend.placing import Comm, Layout, place
from npu_replay.errors import ReplayError

# Each data-parallel rank's tokens.
BATCHES = [(13,), (1,), (2,), (16,), (13, 9), (9, 13), (1, 8), (7, 7), (5, 1, 12)]
TP = [1, 2, 3, 4]


def label(dp_rank: int, tokens: int) -> torch.Tensor:
    """A number for each token; -1 is what fills up."""
    return torch.arange(tokens) + 1000 * (dp_rank + 1)


def filled(tokens: torch.Tensor, to: int) -> torch.Tensor:
    return torch.cat([tokens, torch.full((to - len(tokens),), -1)])


def parts(tokens: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Equal parts, the last filled up: what sequence parallelism gives each rank."""
    return list(filled(tokens, -(-len(tokens) // ranks) * ranks).chunk(ranks))


def chosen(comm: Comm, batch: tuple[int, ...], tp: int, sharded: bool, newest: bool) -> dict:
    """The tokens that each rank (dp, tp) chooses experts of, and how many came in."""
    own = [label(rank, tokens) for rank, tokens in enumerate(batch)]
    longest = max(-(-tokens // tp) * tp for tokens in batch)
    by_rank = {}
    for (dp, tokens), rank in itertools.product(enumerate(own), range(tp)):
        entered = tokens
        if sharded:
            # to 0.26 the runner fills up to the longest first; from 0.27 on each has its own length
            entered = (parts(tokens, tp) if newest else list(filled(tokens, longest).chunk(tp)))[rank]
        rows = entered
        if comm == "allgather" and sharded:
            rows = torch.cat([torch.cat(parts(share, tp)) if newest else share for share in own])
        elif comm == "allgather":
            rows = torch.cat([filled(share, max(batch)) for share in own])
        elif sharded and "mc2" in comm:
            rows = filled(entered, longest // tp)
        elif comm == "alltoall" and not sharded:
            rows = filled(tokens, max(tp, len(tokens))).tensor_split(tp)[rank]
        elif not sharded:
            rows = filled(tokens, longest).tensor_split(tp)[rank]
        by_rank[dp, rank] = entered, rows
    return by_rank


@pytest.mark.choice
@pytest.mark.parametrize("newest", [False, True], ids=["to 0.26", "from 0.27"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sequence parallel"])
@pytest.mark.parametrize("comm", ["allgather", "mc2", "fused_mc2", "alltoall"])
@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_every_token_is_placed_once_or_by_all(
    batch: tuple[int, ...], tp: int, comm: Comm, sharded: bool, newest: bool
) -> None:
    written = {
        (dp, rank): torch.zeros(32, dtype=torch.long) for dp in range(len(batch)) for rank in range(tp)
    }
    for (dp, rank), (entered, rows) in chosen(comm, batch, tp, sharded, newest).items():
        layout = Layout(
            comm=comm,
            tokens=batch[dp],
            entered=len(entered),
            sharded=sharded,
            tp_rank=rank,
            tp_size=tp,
            dp_rank=dp,
            across_dp=batch if len(batch) > 1 else (),
        )
        first, tokens, row = place(layout, len(rows))
        written[dp, rank][row : row + tokens] = rows[first : first + tokens]
    for dp, tokens in enumerate(batch):
        of_ranks = torch.stack([written[dp, rank] for rank in range(tp)])
        merged = of_ranks.amax(0)
        assert merged[:tokens].tolist() == label(dp, tokens).tolist()
        assert not merged[tokens:].any(), "a row that only fills up was written"
        assert set(of_ranks[:, :tokens].bool().sum(0).tolist()) <= {1, tp}


PART = {"tokens": 6, "entered": 3, "sharded": True, "tp_size": 2, "across_dp": (6, 12)}


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (Layout(comm="allgather", tokens=13, entered=13, tp_size=2), 14),
        (Layout(comm="mc2", tokens=13, entered=13, tp_size=2), 13),
        (Layout(comm="alltoall", tokens=13, entered=13, tp_size=2), 8),
        (Layout(comm="alltoall", tokens=13, entered=7, sharded=True, tp_size=2), 13),
        (Layout(comm="none", tokens=13, entered=13, tp_size=2), 7),
        # a part is filled up to the longest rank's under mc2 alone
        (Layout(comm="alltoall", **PART), 6),
    ],
    ids=lambda value: value.comm if isinstance(value, Layout) else None,
)
def test_rows_that_cannot_come_about_are_refused(layout: Layout, rows: int) -> None:
    with pytest.raises(ReplayError, match=f"{rows} rows, and their place in the batch isn't known"):
        place(layout, rows)


def test_the_way_of_communication_decides_where_sizes_are_equal() -> None:
    """One token on two ranks: each has one row, and in two of three ways the second one's is no token."""
    second = {"tokens": 1, "entered": 1, "tp_rank": 1, "tp_size": 2}
    assert place(Layout(comm="alltoall", **second), 1).tokens == 0
    assert place(Layout(comm="mc2", **second), 1).tokens == 0
    assert place(Layout(comm="mc2", keeps_all=True, **second), 1) == (0, 1, 0)
    assert place(Layout(comm="none", **second), 1) == (0, 1, 0)
    assert place(Layout(comm="mc2", **PART), 6) == (0, 3, 0)
