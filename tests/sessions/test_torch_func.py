"""An update by torch.func: its transforms wrap all tensors, and tokens are compared all the same."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad

import npu_replay
from zoo import hugging_face


@pytest.fixture
def setting() -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    model = hugging_face.build("qwen3_moe")
    return model, dict(model.named_parameters()), hugging_face.batches(1)[0]


def gradients(
    model: torch.nn.Module, parameters: dict[str, torch.Tensor], tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        called = functional_call(model, values, kwargs={"input_ids": tokens, "use_cache": False})
        return called.logits.square().mean()

    return grad(loss)(parameters)


@pytest.mark.parametrize("how", ["replay", "follow"])
def test_a_gradient_by_torch_func_is_that_of_the_recorded_experts(
    how: str, setting: tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]
) -> None:
    model, parameters, tokens = setting
    expected = gradients(*setting)
    if how == "follow":
        with npu_replay.follow(model) as following:
            with torch.no_grad():
                model(input_ids=tokens)
            replayed = gradients(*setting)
        assert following.metrics()["replayed"] == len(tokens)
    else:
        with torch.no_grad(), npu_replay.record(model) as recording:
            model(input_ids=tokens)
        with npu_replay.record(model) as inside:
            gradients(*setting)
        assert inside.routes == recording.routes
        with npu_replay.replay(model, recording.routes) as replay:
            replayed = gradients(*setting)
        assert replay.metrics()["tokens_compared"] == 1
    assert all(torch.equal(replayed[name], expected[name]) for name in parameters)
