"""follow with two processes, each with its own samples: DDP and FSDP2, begun before and after wrapping.

`work` is one of the processes.
"""

from __future__ import annotations

from typing import Any

import pytest

import jobs

PROCESSES = 2
CASES = ("DDP, the model in it", "DDP itself", "FSDP2 before", "FSDP2 after")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[int]]]:
    """What each process found by case: token-layers of updates, wrong ones, and those of the record that a
    free run would have chosen otherwise."""
    return jobs.run_ranks("distributed.test_follow:work", {}, PROCESSES)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_replays_what_it_recorded(results: list[dict[str, list[int]]], case: str) -> None:
    for found in results:
        updates, wrong, moved = found[case]
        assert updates == 2 * 3 * 35  # each layer, and its recompute
        assert wrong == 0
        assert moved > 10


def work(task: dict[str, Any]) -> dict[str, list[int]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {case: _try(case, task["rank"]) for case in CASES}
    dist.destroy_process_group()
    return found


def _try(case: str, rank: int) -> list[int]:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import npu_replay
    from sessions.test_follow import Seen, learn, model, padded, texts

    made = whole = model(recompute="non-reentrant")
    early = npu_replay.follow(made).open() if case == "FSDP2 before" else None
    if case.startswith("DDP"):
        whole = DistributedDataParallel(made, static_graph=True)
    else:
        for layer in made.model.layers:
            fully_shard(layer)
        fully_shard(made)
    following = early or npu_replay.follow(whole if case == "DDP itself" else made).open()
    sequences, seen = texts(seed=rank), Seen(made, own=False)
    fed = padded(sequences, left=2)

    def free() -> list[list[torch.Tensor]]:
        """What a pass without grad chooses that is no record."""
        with following.paused(), torch.no_grad():
            whole(**fed[0])
        return seen.of(fed[1])

    with torch.no_grad():
        whole(fed[0]["input_ids"], fed[0]["attention_mask"])
    wanted = seen.of(fed[1])
    with torch.no_grad():
        for path, weight in made.named_parameters():
            if path.endswith("gate.weight"):
                here = weight.to_local() if hasattr(weight, "to_local") else weight
                here.copy_(here.flip(0))  # on every rank alike
    moved = _differing(free(), wanted, range(3))
    updates = wrong = 0
    for part in ([4, 0], [3, 1, 2]):
        fed_now = padded([sequences[n] for n in part], right=3)
        learn(whole, fed_now)
        layers, got = seen.layers(), seen.of(fed_now[1])
        updates += sum(len(ids) for calls in got for ids in calls)
        wrong += _differing(got, [wanted[n] for n in part], layers)
    following.close()
    return [updates, wrong, moved]


def _differing(got: Any, wanted: Any, layers: Any) -> int:
    return sum(
        int((ids != recorded[layer]).any(1).sum())
        for calls, recorded in zip(got, wanted, strict=True)
        for layer, ids in zip(layers, calls, strict=True)
    )
