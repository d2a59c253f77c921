"""SGLang's own code between its scheduler and the caller.

Importing `sglang` wants torchvision and triton. So its packages are entered without their `__init__`, and of
the managers, whose imports are the whole engine, single functions are taken as they stand: their unchanged
text, with the real modules that they name.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pybase64
import torch

from npu_replay.rollout.release_rules import release

VERSION = version("sglang")
AT = release(VERSION)

_spec = find_spec("sglang")
assert _spec is not None
assert _spec.origin is not None
SOURCE = Path(_spec.origin).parent

NAMES = {"np": np, "torch": torch, "pybase64": pybase64}


def meta_info(rows: torch.Tensor | None, said: dict[str, Any], *, text: bool = True) -> dict[str, Any]:
    """What the caller is given of one request.

    Args:
        rows: [rows, layers, topk] int32, from the scheduler; None where it collected none.
        said: what else stands in it.
        text: False is skip_tokenizer_init, with which the detokenizer is left out.
    """
    name = "output_routed_experts" if AT < (0, 5, 8) else "routed_experts"
    batch = SimpleNamespace(**{name: [rows]})
    if text:
        setattr(batch, name, _written(batch))
    found = dict(said)
    exec(_filling(), NAMES | {"recv_obj": batch, "i": 0, "meta_info": found})
    return found


def openai_protocol() -> ModuleType:
    """`sglang.srt.entrypoints.openai.protocol`, imported."""
    return _imported("sglang.srt.entrypoints.openai.protocol")


def openai_rows(meta: dict[str, Any]) -> str | None:
    """What its OpenAI servers put into sglext."""
    process = _imported("sglang.srt.entrypoints.openai.utils").process_routed_experts_from_ret
    return process({"meta_info": meta}, SimpleNamespace(return_routed_experts=True))


def _written(batch: SimpleNamespace) -> Any:
    """By the detokenizer manager; 0.5.10 leaves it to the tokenizer manager."""
    file = "srt/managers/detokenizer_manager.py"
    if AT < (0, 5, 10):
        return _taken(file, "_extract_routed_experts")(None, batch)
    if AT < (0, 5, 11):
        return batch.routed_experts
    return _taken(file, "_b64_encode_per_request")(batch.routed_experts)


@functools.cache
def _filling() -> Any:
    """The tokenizer manager's statement that puts the rows into meta_info."""
    for node in ast.walk(_parsed("srt/managers/tokenizer_manager.py")):
        if (
            isinstance(node, ast.If)
            and "routed_experts" in ast.unparse(node.test)
            and "getattr" in ast.unparse(node.test)
        ):
            return compile(ast.Module([node], []), "tokenizer_manager.py", "exec")
    raise LookupError("tokenizer_manager.py no longer fills meta_info in an if statement")


@functools.cache
def _taken(file: str, name: str) -> Any:
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list = []
            there = dict(NAMES)
            # Its annotations name the engine's classes: they stay text, as in this file, whose future import
            # `compile` takes over.
            exec(compile(ast.Module([node], []), file, "exec"), there)
            return there[name]
    raise LookupError(f"{file} has no function {name}")


def _parsed(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def _imported(name: str) -> ModuleType:
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        package = ".".join(parents[:depth])
        if package not in sys.modules:
            spec = find_spec(package)
            assert spec is not None
            sys.modules[package] = module_from_spec(spec)
    return importlib.import_module(name)
