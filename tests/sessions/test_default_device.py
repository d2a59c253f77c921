"""Scripts for one accelerator set torch's default device: what npu_replay makes on the host stays there.

Here that device is "meta", where a tensor that was made by mistake holds nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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


FACTORIES = {"arange", "empty", "full", "ones", "tensor", "zeros"}


def test_every_tensor_that_is_made_names_its_device() -> None:
    """But smoke's model, which is a script of its own."""
    package = Path(npu_replay.__file__).parent
    files = [file for folder in (package, package.parent / "compat") for file in folder.rglob("*.py")]
    silent = [
        f"{file.relative_to(package.parent)}:{node.lineno}"
        for file in files
        if file.parent.name != "smoke"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert len(files) > 100
    assert silent == []
