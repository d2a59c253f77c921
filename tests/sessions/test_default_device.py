"""Scripts for one accelerator set torch's default device: what npu_replay makes on the host stays there."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import npu_replay

SCRIPTS = ("smoke", "doctor")
"""Their models are their own, as a script's are."""
OF_A_TENSOR = "as_tensor"
"""It leaves a tensor where it is."""


def test_every_tensor_that_is_made_names_its_device() -> None:
    factories = {function.__name__ for function in torch.utils._device._device_constructors()} - {OF_A_TENSOR}
    assert {"arange", "empty", "full", "ones", "tensor", "zeros"} <= factories
    package = Path(npu_replay.__file__).parent
    files = [file for folder in (package, package.parent / "compat") for file in folder.rglob("*.py")]
    assert len(files) > 100
    silent = []
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = {call.func for call in calls if "device" in {keyword.arg for keyword in call.keywords}}
        silent += [
            f"{file.relative_to(package.parent)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
            if node.attr in factories and node not in named and file.parent.name not in SCRIPTS
        ]
    assert silent == []
