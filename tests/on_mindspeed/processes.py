"""Processes with a `mindspeed` on the path: the real one, or the stand-in.

MindSpeed changes torch and Megatron for the whole process when it is imported. So no test imports it: a
process of its own does.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import typing_extensions

import jobs
from on_mindspeed.stand_in.mindspeed.branch import BRANCH

TESTS = Path(__file__).parents[1]
STAND_IN = "stand-in"
REAL = "real"
_OWN = (STAND_IN_FOLDER := Path(__file__).parent / "stand_in", STUBS := TESTS / "stubs", TESTS)
TRANSFORMER_ENGINE_NPU = STUBS / "transformer_engine_npu"
MEGATRON_ADAPTOR = STUBS / "megatron_adaptor_stand_in"
"""With what MindSpeed's stand-in is made of, too. Nothing imports MegatronAdaptor itself but a MindSpeed from
core_r0.17.0 on, and a target that asks for it."""


def run_ranks(
    product: str, target: str, task: dict[str, Any], count: int, timeout: float = 200, before: str = ""
) -> list[dict[str, Any]]:
    """What `target` of this folder returns in each of `count` processes (jobs.run_ranks).

    Args:
        product: STAND_IN or REAL.
        before: that of jobs.start, for ranks that are forks.
    """
    real = _has_torch_npu()
    path = beside_real() if product == REAL else _stand_in()
    if MEGATRON_ADAPTOR not in path and PathFinder.find_spec("megatron_adaptor", _foreign_path()) is None:
        path.append(MEGATRON_ADAPTOR)
    return jobs.run_ranks(
        target if "." in target else f"on_mindspeed.{target}",
        task | {"product": product},
        count,
        fresh=real,  # it comes with torch
        before="" if real else before,
        path=[*path, *([] if product == REAL and real else [STUBS])],
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if real else "0"},
        timeout=timeout,
    )


@contextlib.contextmanager
def lent_at_import() -> Iterator[None]:
    """For a script: lend triton, and Python 3.12's typing.override, while MindSpeed or Megatron is imported.

    Newer MindSpeed defines kernels when it is imported, and Megatron-LM's tree from 0.18 on does too. What
    asks for triton later has to hear that there is none: torch, and MindSpeed's choice between a kernel and
    plain torch. `override`, which megatron.training wants from 0.18 on, stays.
    """
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    if PathFinder.find_spec("triton") is not None:
        yield
        return
    sys.path.append(str(STUBS / "at_import"))
    try:
        yield
    finally:
        sys.path.remove(str(STUBS / "at_import"))
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "triton"]


def real_mindspeed() -> str:
    """Where a real MindSpeed lies; empty if there is none."""
    spec = PathFinder.find_spec("mindspeed", _foreign_path())
    return "" if spec is None or spec.origin is None else spec.origin


def _stand_in() -> list[Path]:
    beside = [TRANSFORMER_ENGINE_NPU] if BRANCH.over_megatron_adaptor else []
    return [STAND_IN_FOLDER, MEGATRON_ADAPTOR, *beside]


def beside_real() -> list[Path]:
    """Stand-ins for the packages that this MindSpeed needs, from core_r0.17.0 on, and that aren't there."""
    if "megatron_adaptor" not in Path(real_mindspeed()).read_text(encoding="utf-8"):
        return []
    folders = {"transformer_engine": TRANSFORMER_ENGINE_NPU, "megatron_adaptor": MEGATRON_ADAPTOR}
    foreign = _foreign_path()
    return [folder for name, folder in folders.items() if PathFinder.find_spec(name, foreign) is None]


@functools.cache
def _has_torch_npu() -> bool:
    """Can a real torch_npu be imported? One that is installed where its driver isn't can't."""
    if PathFinder.find_spec("torch_npu", _foreign_path()) is None:
        return False
    tried = subprocess.run([sys.executable, "-c", "import torch, torch_npu"], capture_output=True)
    return tried.returncode == 0


def _foreign_path() -> list[str]:
    return [folder for folder in sys.path if Path(folder or ".").resolve() not in _OWN]
