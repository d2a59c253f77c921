"""Compiled modules around a router: eager while any block is open, compiled again afterwards."""

from __future__ import annotations

import pytest
import torch

import npu_replay
from zoo.toys import ToyModel, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def compiled_model() -> ToyModel:
    model = ToyModel()
    model.compile(backend="eager")
    model(tokens())
    return model


def test_blocks_that_overlap_keep_the_stance_and_torchs_names_until_the_last_one_ends() -> None:
    natives = torch.topk, torch.Tensor.topk
    one = compiled_model()
    two = compiled_model()
    first = npu_replay.record(one)
    second = npu_replay.record(two)
    first.__enter__()
    second.__enter__()
    one(tokens())
    first.__exit__(None, None, None)
    assert stance() == "force_eager"
    assert torch.topk is not natives[0]
    two(tokens())
    second.__exit__(None, None, None)
    assert stance() == "default"
    assert (torch.topk, torch.Tensor.topk) == natives
    assert "topk" not in vars(torch.Tensor)
    assert first.routes[0].layers == second.routes[0].layers == (0, 1)


def test_the_stance_is_the_processs_and_left_alone_where_no_router_is_compiled() -> None:
    model = ToyModel()
    with npu_replay.record(model):
        assert stance() == "default"
        model(tokens())
