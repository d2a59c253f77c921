"""Scripts for one accelerator set torch's default device: what npu_replay makes on the host stays there.

Here that device is "meta", where a tensor that was made by mistake holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import npu_replay
from npu_replay import RoutedExperts, TokenLayout, fingerprint
from zoo.toys import ToyModel, foreign, tokens

pytestmark = pytest.mark.usefixtures("toy_routers", "default_device")


@pytest.fixture
def default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


def sample(length: int, experts: int = 8) -> RoutedExperts:
    ids = np.argsort(np.random.default_rng(length).random((length, 2, experts)), axis=2)[..., :2]
    mark = fingerprint(np.arange(length))
    return RoutedExperts(ids=ids, layers=[0, 1], num_experts=experts, fingerprint=mark)


def test_routes_and_layouts() -> None:
    three, five = sample(3), sample(5)
    assert RoutedExperts.from_bytes(three.to_bytes()) == three
    assert len(RoutedExperts.concat([three, five]).take([0, -1])) == 2
    with torch.device("cpu"):
        ids = torch.tensor([[0, 1, 2, 9, 9], [0, 1, 2, 3, 4]])
    mask = [[1, 1, 1, 0, 0], [1] * 5]
    probed = TokenLayout.from_probe(lambda sequences: torch.cat(sequences), [3, 5], order="batch")
    padded = TokenLayout.padded([3, 5], 5, order="batch")
    for layout in (probed, padded, TokenLayout.packed([3, 5]), TokenLayout.of_batch(ids, np.array(mask))):
        rows = layout.gather([three, five])
        assert torch.equal(layout.scatter(rows)[1].ids, five.ids)
        assert npu_replay.collect([rows], [layout], [])[0] is not None
    assert RoutedExperts.unrecorded(2, layers=[0], topk=2, num_experts=8).ids.device.type == "cpu"


def test_record_and_replay() -> None:
    with torch.device("cpu"):
        model = ToyModel()
        batches = [tokens(seed) for seed in range(2)]
        others = foreign(2)
    with torch.no_grad(), npu_replay.record(model) as recording:
        for batch in batches:
            model(batch)
    for routes in (recording.routes, others):
        with npu_replay.replay(model, routes, live_mismatch=True) as replay:
            for batch in batches:
                model(batch).sum().backward()
        assert replay.metrics()["micro_batches"] == 2
