"""Figures and errors of all ranks, over real gloo processes. `work` is one of three.

Ranks that are killed or fail at some moment of collect are in test_leaving.py.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import jobs

PROCESSES = 3
BROKE = "layer 4: it broke"

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    return jobs.by_case("distributed.test_rank_failures:work", PROCESSES)


def test_figures_are_added_up(results: dict[str, list[str]]) -> None:
    assert results["sums"] == ["{'ranks': 3, 'rows': 60000000003}"] * PROCESSES


def test_the_lowest_rank_with_an_error_has_the_whole_message(results: dict[str, list[str]]) -> None:
    assert results["errors"] == [
        "[npu_replay] rank 1 stopped, and so does this one: layer 4: it broke",
        "[npu_replay] layer 4: it broke. Expected sense, got none. Usual cause: bad luck on 1",
        f"[npu_replay] rank 1 stopped, and so does this one: {BROKE} (and this rank: {BROKE})",
    ]


def test_a_rank_that_is_not_here_is_named(results: dict[str, list[str]]) -> None:
    """A node without npu_replay, or with it turned off there alone, would be a hang."""
    assert results["all here"] == ["True"] * PROCESSES
    told = results["absent"]
    assert told[2] == "None", "the last rank doesn't ask"
    for rank in (0, 1):
        assert f"rank {rank}: not all ranks take part in the replay" in told[rank]
        assert "nothing from ranks [2]" in told[rank]


def test_a_store_that_has_gone_is_said_to_be_gone(results: dict[str, list[str]]) -> None:
    """Whoever keeps it has failed before; the others would show a torch.distributed.DistNetworkError."""
    for rank, told in enumerate(results["no store"]):
        assert f"rank {rank}: not all ranks take part in the replay" in told
        assert "it no longer answers (Broken pipe)" in told
        assert "rank 0 or its launcher" in told


def test_whatever_an_error_says_the_others_can_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it: a text that can't be had or can't be sent is no reason to leave them there."""
    import torch.distributed as dist

    from npu_replay.parallel import rank_failures

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for error, words in (
        (ValueError("half \udcff"), "ValueError: half ?"),
        (Mute(), "can't be had (ValueError)"),
    ):
        news = rank_failures._news(error)
        assert news is not None
        assert news.startswith("rank 1 stopped, and so does this one: ")
        assert words in news.encode().decode()


def test_they_go_on_together_afterwards(results: dict[str, list[str]]) -> None:
    assert results["again"] == ["{'ranks': 3}"] * PROCESSES


def work(task: dict[str, Any]) -> dict[str, str]:
    import torch.distributed as dist

    from npu_replay.errors import ReplayError
    from npu_replay.parallel.rank_failures import agreed, all_here

    rank = task["rank"]
    dist.init_process_group("gloo")
    found = {"sums": f"{agreed(None, {'ranks': 1, 'rows': 20_000_000_000 + rank})}"}
    error = ReplayError(
        "it broke", where="layer 4", expected="sense", got="none", cause=f"bad luck on {rank}"
    )
    try:
        agreed(None if rank == 0 else error, {"ranks": 1})
    except ReplayError as raised:
        found["errors"] = str(raised)
    found["again"] = str(agreed(None, {"ranks": 1}))
    all_here(patience=60)
    found["all here"] = "True"
    absent = None
    if rank != PROCESSES - 1:
        try:
            all_here(patience=2)
        except ReplayError as raised:
            absent = raised
    found["absent"] = str(absent)
    with mock.patch.object(dist.PrefixStore, "set", side_effect=dist.DistNetworkError("Broken pipe")):
        try:
            all_here(patience=2)
        except ReplayError as raised:
            found["no store"] = str(raised)
    dist.barrier()  # who leaves early cuts the others off
    return found
