"""FSDP2 and FSDP1 with two processes: record changes nothing, and replay repeats the record.

`work` is one of the processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import jobs
import tiny_qwen
from choice import WHOLE

if TYPE_CHECKING:
    import torch

PROCESSES = 2
WAYS = [*itertools.product(("fp32", "bf16"), ("layers", "layers and routers"), ("sum", "each"))]
# Any two of the three meet in these.
CASES = [
    f"{precision}-{wrap}-{recompute}-{order}"
    for precision, wrap, order in (WAYS if WHOLE else [WAYS[one] for one in (0, 3, 5, 6)])
    for recompute in ("kept", "recomputed")
]
OF_FSDP1 = [f"{weights}-{recompute}" for weights in ("views", "flat") for recompute in ("kept", "recomputed")]
"""The model's weights as views of what is sharded (use_orig_params), or that itself."""
CHECKS = (
    "record changes nothing",
    "replay repeats the record",
    "routers follow the routes",
    "gradients as without recompute",
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    """What each process found, by case and check."""
    return jobs.run_ranks("distributed.test_fsdp2:work", {}, PROCESSES)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES)
def test_fsdp2_is_recorded_and_replayed_s1_s2(results: list[dict[str, str]], case: str, check: str) -> None:
    assert [found.get(f"{case}: {check}") for found in results] == ["True"] * PROCESSES


@pytest.mark.parametrize("check", CHECKS[:3])
@pytest.mark.parametrize("case", OF_FSDP1)
def test_fsdp1_is_recorded_and_replayed(results: list[dict[str, str]], case: str, check: str) -> None:
    assert [found.get(f"{case}: {check}") for found in results] == ["True"] * PROCESSES


def test_ranks_record_their_own_tokens(results: list[dict[str, str]]) -> None:
    assert [found["ranks differ"] for found in results] == ["True"] * PROCESSES


def test_dtensor_activations_are_refused_by_name_s2(results: list[dict[str, str]]) -> None:
    for found in results:
        assert "the scores are a DTensor" in found["DTensor"]
        assert "parallelize_module" in found["DTensor"]
        assert "FSDP2 alone is fine" in found["DTensor"]


def work(task: dict[str, Any]) -> dict[str, str]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = task["rank"]
    found: dict[str, str] = {}

    def tell(what: str, this: object) -> None:
        found[what] = str(this)

    kept: dict[str, list[torch.Tensor]] = {}
    for case in CASES:
        _try_fsdp(case, rank, tell, kept)
    for case in OF_FSDP1:
        _try_fsdp1(case, rank, tell)
    _try_dtensor(tell)
    dist.destroy_process_group()
    return found


def _try_fsdp(
    case: str, rank: int, tell: Callable[[str, object], None], kept: dict[str, list[torch.Tensor]]
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import npu_replay

    precision, wrap, recompute, order = case.split("-")
    model = tiny_qwen.make(64, layers=2).train()
    if recompute == "recomputed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh("cpu", (PROCESSES,))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        if wrap == "layers and routers":
            fully_shard(layer.mlp.gate, mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    generator = torch.Generator().manual_seed(10 + rank)
    batches = [torch.randint(3, 60, (2, 6), generator=generator) for _ in range(2)]

    def train() -> list[torch.Tensor]:
        model.zero_grad()
        losses = []
        for batch in batches:
            losses.append(model(input_ids=batch, labels=batch, use_cache=False).loss)
            if order == "each":
                losses[-1].backward()
        if order == "sum":
            torch.stack(losses).sum().backward()
        gradients = [weight.grad.to_local().clone() for weight in model.parameters()]
        return [*(loss.detach() for loss in losses), *gradients]

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    untouched = train()
    with npu_replay.record(model) as recording:
        recorded = train()
    with npu_replay.replay(model, recording.routes):
        replayed = train()
    tell(f"{case}: {CHECKS[0]}", same(untouched, recorded))
    tell(f"{case}: {CHECKS[1]}", same(recorded, replayed))
    torch.manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.to_local().normal_()
    shown: list[torch.Tensor] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: shown.append(output[2]))
        for layer in model.model.layers
    ]
    with npu_replay.replay(model, recording.routes):
        changed = train()
    wanted = kept.setdefault(case.replace("recomputed", "kept"), changed)
    tell(f"{case}: {CHECKS[3]}", same(wanted, changed))
    for handle in handles:
        handle.remove()
    routes = [one.layer_ids(layer).long() for one in recording.routes for layer in one.layers]
    if order == "each":  # recomputes come between the micro-batches
        step = len(shown) // 2
        shown = [*shown[: len(routes) // 2], *shown[step : step + len(routes) // 2]]
    followed = all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(shown, routes, strict=False))
    tell(f"{case}: {CHECKS[2]}", followed and len(shown) >= len(routes) and not same(recorded, train()))
    if case == CASES[0]:
        digests = torch.zeros(PROCESSES, dtype=torch.int64)
        digests[rank] = recording.routes[0].ids.long().flatten().cumsum(0).sum()
        dist.all_reduce(digests)
        tell("ranks differ", digests.unique().numel() == PROCESSES)


def _try_fsdp1(case: str, rank: int, tell: Callable[[str, object], None]) -> None:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import npu_replay

    weights, recompute = case.split("-")
    model = tiny_qwen.make(64, layers=2).train()
    if recompute == "recomputed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=weights == "views",
    )
    generator = torch.Generator().manual_seed(10 + rank)
    batches = [torch.randint(3, 60, (2, 6), generator=generator) for _ in range(2)]

    def train() -> list[torch.Tensor]:
        wrapped.zero_grad()
        losses = [wrapped(input_ids=batch, labels=batch, use_cache=False).loss for batch in batches]
        torch.stack(losses).sum().backward()
        gradients = [one.grad.clone() for one in wrapped.parameters() if one.grad is not None]
        return [*(loss.detach() for loss in losses), *gradients]

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    untouched = train()
    with npu_replay.record(wrapped) as recording:
        recorded = train()
    with npu_replay.replay(wrapped, recording.routes):
        replayed = train()
    tell(f"{case}: {CHECKS[0]}", same(untouched, recorded))
    tell(f"{case}: {CHECKS[1]}", same(recorded, replayed))
    ids = [torch.rand(12, 2, 8, generator=generator).topk(2).indices for _ in batches]
    foreign = [npu_replay.RoutedExperts(ids=one, layers=range(2), num_experts=8) for one in ids]
    shown: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: shown.append(output[2]))
    with npu_replay.replay(wrapped, foreign):
        changed = train()
    wanted = [one[:, layer] for one in ids for layer in range(2)]
    if recompute == "recomputed":  # of the last micro-batch first, and of its last layer
        wanted += wanted[::-1]
    followed = len(shown) == len(wanted) and all(
        torch.equal(a.sort().values, b.sort().values) for a, b in zip(shown, wanted, strict=True)
    )
    tell(f"{case}: {CHECKS[2]}", followed and not same(recorded, changed))


def _try_dtensor(tell: Callable[[str, object], None]) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    import npu_replay

    mesh = init_device_mesh("cpu", (PROCESSES,))
    router = distribute_module(tiny_qwen.make(64, layers=1).model.layers[0].mlp.gate, mesh)
    hidden = DTensor.from_local(torch.randn(6, 32), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    try:
        with npu_replay.record(router):
            router(hidden)
        tell("DTensor", "no error")
    except npu_replay.ReplayError as error:
        tell("DTensor", error)
