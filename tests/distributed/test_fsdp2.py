"""FSDP2, FSDP1 and DDP with two processes: record changes nothing, replay repeats the record, follow follows.

`work` is one of the processes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import jobs
import npu_replay
from choice import WHOLE
from zoo import qwen
from zoo.outcome import random_routes, same
from zoo.qwen_sharded import other_routers

PROCESSES = 2
_WAYS = [*itertools.product(("fp32", "bf16"), ("layers", "layers and routers"), ("sum", "each"))]
# Any two of the three meet in these. FSDP1's weights are views of what is sharded (use_orig_params), or that.
WAYS = _WAYS if WHOLE else [_WAYS[number] for number in (0, 3, 5, 6)]
WAYS += [("fsdp1", "views", "sum"), ("fsdp1", "flat", "sum")]
CHECKS = (
    "record changes nothing",
    "replay repeats the record",
    "routers follow the routes",
    "gradients as without recompute",
)
FOLLOWED = ("DDP, the model in it", "DDP itself", "FSDP2 before", "FSDP2 after")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def results() -> list[Found]:
    """What each process found, by case."""
    return jobs.run_ranks("distributed.test_fsdp2:work", {}, PROCESSES)


@pytest.mark.parametrize("recompute", ["kept", "recomputed"])
@pytest.mark.parametrize("way", ["-".join(way) for way in WAYS])
def test_fsdp_is_recorded_and_replayed_s1_s2(results: list[Found], way: str, recompute: str) -> None:
    for result in results:
        assert result[f"{way}-{recompute}"] == dict.fromkeys(CHECKS, True)


def test_dtensor_activations_are_refused_by_name_s2(results: list[Found]) -> None:
    for result in results:
        assert "the scores are a DTensor" in result["DTensor"]
        assert "FSDP2 alone is fine" in result["DTensor"]


@pytest.mark.parametrize("case", FOLLOWED)
def test_each_rank_follows_what_it_recorded(results: list[Found], case: str) -> None:
    """In each of two updates, and there each layer twice: once in its recompute."""
    for result in results:
        assert result[case] == [2 * 3] * 2


def work(task: dict[str, Any]) -> Found:
    dist.init_process_group("gloo")
    results: Found = {}
    for way in WAYS:
        kept: list[torch.Tensor] = []
        for recompute in ("kept", "recomputed"):
            results["-".join([*way, recompute])] = _try(way, recompute, task["rank"], kept)
    results["DTensor"] = _try_dtensor()
    for case in FOLLOWED:
        results[case] = _follow(case, task["rank"])
    dist.destroy_process_group()
    return results


def _wrapped(model: Any, precision: str, wrap: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = model.model.layers
    if precision == "fsdp1":
        policy = ModuleWrapPolicy({type(layers[0])})
        cpu = torch.device("cpu")
        views = wrap == "views"
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=views)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
    routers = [layer.mlp.gate for layer in layers] if wrap == "layers and routers" else []
    for part in [*routers, *layers, model]:
        fully_shard(part, mp_policy=mixed)
    return model


def _try(way: tuple[str, ...], recompute: str, rank: int, kept: list[torch.Tensor]) -> dict[str, bool]:
    precision, wrap, order = way
    model = qwen.make(64, layers=2).train()
    if recompute == "recomputed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = _wrapped(model, precision, wrap)
    generator = torch.Generator().manual_seed(10 + rank)
    batches = [torch.randint(3, 60, (2, 6), generator=generator) for _ in range(2)]

    def train() -> list[torch.Tensor]:
        wrapped.zero_grad()
        losses = []
        for batch in batches:
            losses.append(wrapped(input_ids=batch, labels=batch, use_cache=False).loss)
            if order == "each":
                losses[-1].backward()
        if order == "sum":
            torch.stack(losses).sum().backward()
        gradients = [weight.grad for weight in wrapped.parameters() if weight.grad is not None]
        local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        return [*(loss.detach() for loss in losses), *(gradient.clone() for gradient in local)]

    untouched = train()
    with npu_replay.record(wrapped) as recording:
        recorded = train()
    with npu_replay.replay(wrapped, recording.routes):
        replayed = train()
    foreign = random_routes([12, 12], range(2), 8, 2, seed=rank)
    with npu_replay.observe(wrapped) as seen, npu_replay.replay(wrapped, foreign):
        changed = train()
    if recompute == "kept":
        kept[:] = changed
    follows = not npu_replay.compare(seen.shown, foreign).differing and not same(recorded, changed)
    checks = same(untouched, recorded), same(recorded, replayed), follows, same(kept, changed)
    return dict(zip(CHECKS, checks, strict=True))


def _try_dtensor() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    mesh = init_device_mesh("cpu", (PROCESSES,))
    router = distribute_module(qwen.make(64, layers=1).model.layers[0].mlp.gate, mesh)
    hidden = DTensor.from_local(torch.randn(6, 32), mesh, [Replicate()])
    with pytest.raises(npu_replay.ReplayError) as refused, npu_replay.record(router):
        router(hidden)
    return str(refused.value)


def _follow(case: str, rank: int) -> list[int]:
    """How many calls of routers each update had: all took what was recorded, which they wouldn't choose."""
    from sessions.test_follow import Seen, assert_replayed, learn, model, padded, record, texts

    made = whole = model(recompute="non-reentrant")
    early = npu_replay.follow(made).open() if case == "FSDP2 before" else None
    if case.startswith("DDP"):
        whole = DistributedDataParallel(made, static_graph=True)
    else:
        _wrapped(made, "fp32", "layers")
    following = early or npu_replay.follow(whole if case == "DDP itself" else made).open()
    sequences = texts(seed=rank)
    seen = Seen(made)
    recorded = record(whole, padded(sequences, left=2), seen)
    calls = []
    with other_routers(made):
        for part in ([4, 0], [3, 1, 2]):
            fed = padded([sequences[n] for n in part], right=3)
            learn(whole, fed)
            calls.append(len(seen.calls))
            assert_replayed(seen, fed, [recorded[n] for n in part])
    following.close()
    return calls
