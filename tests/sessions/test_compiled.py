"""Compiled modules around a router: eager while any block is open, compiled again afterwards."""

from __future__ import annotations

import pytest
import torch

import npu_replay
from npu_replay.seam import torch_state
from zoo.toys import ToyModel, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def compiled_model() -> ToyModel:
    model = ToyModel()
    model.compile(backend="eager")
    model(tokens())
    return model


def test_blocks_that_overlap_keep_the_stance_until_the_last_one_ends() -> None:
    one = compiled_model()
    two = compiled_model()
    first = npu_replay.record(one)
    second = npu_replay.record(two)
    first.__enter__()
    second.__enter__()
    one(tokens())
    first.__exit__(None, None, None)
    assert stance() == "force_eager"
    two(tokens())
    second.__exit__(None, None, None)
    assert stance() == "default"
    assert first.routes[0].layers == second.routes[0].layers == (0, 1)


def test_the_stance_is_the_processs_and_left_alone_where_no_router_is_compiled() -> None:
    model = ToyModel()
    with npu_replay.record(model):
        assert stance() == "default"
        model(tokens())


def test_a_compiled_wrapper_works_when_it_is_what_was_passed() -> None:
    model = ToyModel()
    with npu_replay.record(model) as plain:
        model(tokens())
    outer = torch.compile(model, backend="eager")
    outer(tokens())
    assert torch_state.is_compiled(outer)
    with npu_replay.record(outer) as recording:
        outer(tokens())
    assert recording.routes == plain.routes
