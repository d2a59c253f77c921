"""FSDP2 and FSDP1 on an accelerator, for this process alone: weights gathered and let go layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import npu_replay
from npu_replay import devices
from zoo import qwen
from zoo.outcome import random_routes

pytestmark = [pytest.mark.accelerator, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def process_group(device: torch.device) -> Iterator[None]:
    if device.type != "cpu" and "simulated" in getattr(torch, device.type).get_device_name():
        pytest.skip("FSDP2 changes the size of storages, which the simulated NPU can't")
    store = dist.HashStore()
    dist.init_process_group(devices.backend(device), store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(device: torch.device, kind: str, precision: str, *, recompute: bool) -> nn.Module:
    model = qwen.make(64, layers=2).train()
    model.set_experts_implementation("eager")
    model.to(device)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    dtype = torch.bfloat16 if precision == "bf16" else None
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
            mixed_precision=MixedPrecision(param_dtype=dtype),
            device_id=device,
            use_orig_params=True,
        )
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Losses of two micro-batches, and every gradient of one backward over both."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(10)
    batches = [torch.randint(3, 60, (2, 6), generator=generator).to(device) for _ in range(2)]
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss for batch in batches]
    torch.stack(losses).sum().backward()
    gradients = [getattr(weight.grad, "_local_tensor", weight.grad).clone() for weight in model.parameters()]
    assert all(gradient.device.type == device.type for gradient in gradients)
    return [*(loss.detach() for loss in losses), *gradients]


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_sharded_model_is_recorded_and_replayed(
    kind: str, precision: str, recompute: bool, device: torch.device
) -> None:
    model = build(device, kind, precision, recompute=recompute)
    untouched = train(model, device)
    with npu_replay.record(model) as recording:
        recorded = train(model, device)
    with npu_replay.replay(model, recording.routes):
        replayed = train(model, device)
    for result in (recorded, replayed):
        torch.testing.assert_close(result, untouched, rtol=1e-3, atol=1e-4)
    foreign = random_routes([12, 12], range(2), 8, 2, seed=3)
    with npu_replay.observe(model) as seen, npu_replay.replay(model, foreign):
        train(model, device)
    assert npu_replay.compare(seen.shown, foreign).differing == 0
