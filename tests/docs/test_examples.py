"""The examples in docstrings give what they say; they know npu_replay, torch and np."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import numpy as np
import pytest
import torch

import npu_replay
from test_house import MODULES

WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an example saves
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    known = {"npu_replay": npu_replay, "torch": torch, "np": np}
    failed, tried = doctest.testmod(importlib.import_module(name), extraglobs=known, optionflags=options)
    assert tried
    assert not failed, "its output is above"
