"""Which of several live models an action of verl's means: the one that is named, or the only one of a
config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.compat.verl.engine_pass import RECORD, REPLAY, Actions
from npu_replay.errors import MicroBatchError
from npu_replay.smoke import megatron_model
from verl_loop import Job, batches

pytestmark = [pytest.mark.megatron, pytest.mark.first_release]


@pytest.fixture(scope="module", autouse=True)
def lent() -> Iterator[None]:
    with npu_replay.compat.cpu.lend():
        megatron_model.start()
        yield


@pytest.fixture
def alone() -> Iterator[Actions]:
    made = Actions()
    yield made
    made.abandon()


def opened(alone: Actions, action: str, *args: Any) -> tuple[Any, int]:
    return (alone.recording if action == RECORD else alone.replaying)(*args)


@pytest.mark.parametrize("action", [RECORD, REPLAY])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_each_of_several_live_models_is_found_by_itself_and_by_its_config(
    order: tuple[int, ...], action: str, alone: Actions
) -> None:
    jobs = [Job("softmax_after_topk", None, seed=number) for number in range(3)]
    alone.set(action)
    for number in order:
        job = jobs[number]
        for model in (job.model, [job.model], None):
            session, chunk = opened(alone, action, model, job.config, None)
            assert session.chunks[chunk] is job.model


@pytest.mark.parametrize("action", [RECORD, REPLAY])
def test_of_two_models_with_one_config_the_one_that_is_named_is_meant(action: str, alone: Actions) -> None:
    first, other = Job("softmax_after_topk", None, seed=1), Job("softmax_after_topk", None, seed=2)
    twin = megatron_model.model(first.config)
    alone.set(action)
    for model in (first.model, twin, other.model):
        session, chunk = opened(alone, action, model, first.config, None)
        assert session.chunks[chunk] is model
    with pytest.raises(MicroBatchError, match=r"several models are in a .*, 2 models"):
        opened(alone, action, None, first.config, None)
    with pytest.raises(MicroBatchError, match=r"no (record|replay) is on .*, 0 models"):
        opened(alone, action, None, object(), None)


def test_what_each_of_two_models_recorded_is_its_own(alone: Actions) -> None:
    jobs = [Job("softmax_after_topk", None, seed=number) for number in range(2)]
    expected = []
    for job in jobs:
        with torch.no_grad(), npu_replay.record(job.model) as recording:
            job.forward(batches()[0])
        expected.append(recording.routes[0].ids)
    assert not torch.equal(*expected)
    alone.set(RECORD)
    for job in reversed(jobs):
        with torch.no_grad():
            job.forward(batches()[0])
    for job, ids in zip(jobs, expected, strict=True):
        session, chunk = alone.recording(job.model, job.config, None)
        assert torch.equal(session.take(chunk).ids, ids)
