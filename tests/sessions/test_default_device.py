"""Scripts for one accelerator set torch's default device: what npu_replay makes on the host stays there."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

import npu_replay

IN_A_WORKER = "compat/vllm_ascend/read_out.py"
"""It is handed what lies on its engine's device."""


def test_every_tensor_that_is_made_names_its_device() -> None:
    """But smoke's model, which is a script of its own."""
    factories = {function.__name__ for function in _device_constructors()}
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
            if node.attr in factories and node not in named and file.parent.name != "smoke"
        ]
    assert [place for place in silent if not place.startswith(IN_A_WORKER)] == []
