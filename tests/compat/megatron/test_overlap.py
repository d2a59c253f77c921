"""On a real Megatron right rows are taken and wrong ones refused, as on families of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_replay
from judged_rows import check, rounded
from npu_replay import RoutedExperts
from npu_replay.smoke import megatron_model
from zoo.gpt import DEVICE, SIGMOID_BIAS, VOCAB, routers

pytestmark = [pytest.mark.megatron, pytest.mark.first_release, pytest.mark.usefixtures("megatron")]

SIZES: dict[str, dict[str, Any]] = {
    "top-1 of 16": {"num_moe_experts": 16, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top-2 of 8": {},
    "top-8 of 64": {"num_moe_experts": 64, "moe_router_topk": 8},
    "top-4 of 32 in groups, sigmoid and bias": SIGMOID_BIAS
    | {"num_moe_experts": 32, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
}


def built(size: str) -> Any:
    """A model of that size, the same in each call, with weights wide enough to route by."""
    torch.manual_seed(7)
    model = megatron_model.model(megatron_model.config(**SIZES[size]), length=512).to(DEVICE).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    for router in routers(model):
        if (bias := getattr(router.module, "expert_bias", None)) is not None:
            bias.copy_(torch.randn(bias.shape) * 0.1)
    return model


@pytest.mark.slow
@pytest.mark.choice(every=2)
@pytest.mark.parametrize("size", SIZES)
def test_right_rows_are_taken_and_wrong_ones_refused(size: str) -> None:
    model = built(size)
    generator = torch.Generator().manual_seed(5)
    tokens, other = torch.randint(0, VOCAB, (2, 1, 400), generator=generator).to(DEVICE)

    def call(of: Any = model, ids: torch.Tensor = tokens) -> None:
        of(input_ids=ids, **megatron_model.causal(ids))

    def recorded(of: Any, ids: torch.Tensor = tokens) -> RoutedExperts:
        with torch.no_grad(), npu_replay.record(of, inputs=False) as recording:
            call(of, ids)
        return recording.routes[0]

    right = {"float32": recorded(model)} | {
        f"{bits} bits": recorded(rounded(built(size), bits)) for bits in (8, 4)
    }
    table = check(call, model, right, recorded(model, other))
    print(f"\nMegatron-core, {size}", *table, sep="\n")
