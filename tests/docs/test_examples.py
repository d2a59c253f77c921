"""The examples in docstrings give what they say.

They know npu_replay, torch and np; a small Qwen3-MoE `model` and its `batch`, two sequences of 12 tokens; and
`routes` of three tokens, the last without one, in the layers 3 and 7.
"""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import numpy as np
import pytest
import torch

import npu_replay
from examples.qwen3_moe.model import qwen3_moe
from test_house import MODULES

WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>>" in path.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    ids = np.array([[[0, 3], [1, 2]], [[2, 1], [0, 1]], [[-1, -1], [-1, -1]]])
    recorded = np.array([True, True, False])
    return {
        "model": qwen3_moe(0, torch.device("cpu"), num_hidden_layers=2, num_experts=8, num_experts_per_tok=2)
        .float()
        .train(),
        "batch": torch.arange(24).view(2, 12),
        "routes": npu_replay.RoutedExperts(ids=ids, layers=[3, 7], num_experts=4, recorded=recorded),
    }


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module(
    name: str, given: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what an example saves
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    known = {"npu_replay": npu_replay, "torch": torch, "np": np, **given}
    failed, tried = doctest.testmod(importlib.import_module(name), extraglobs=known, optionflags=options)
    assert tried
    assert not failed, "its output is above"
