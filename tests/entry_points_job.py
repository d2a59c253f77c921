"""npu_replay's entry points, and a process that loads them as verl 0.9 and vLLM do."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tomllib

GROUPS = ("verl.plugins", "vllm.general_plugins")


def points() -> dict[str, dict[str, str]]:
    """The entry points of an installed npu_replay, by group."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))["project"]["entry-points"]


def write(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Put the metadata of a distribution with these entry points into a folder of the path."""
    about = folder / f"{name.replace('-', '_')}-9.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
        for group, entries in groups.items()
    ]
    (about / "entry_points.txt").write_text("".join(lines))


def process(task: Mapping[str, Any]) -> dict[str, Any]:
    """In a fresh process: load the entry points, import torch; what there is then."""
    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(message)s")
    for group in GROUPS:
        for point in entry_points(group=group, name="npu_replay"):
            loaded = point.load()  # by itself for verl
            if callable(loaded):
                loaded()
    try:
        importlib.import_module("torch")
        raised = ""
    except RuntimeError as error:
        raised = f"{error}"
    if task.get("user"):
        import npu_replay

        assert npu_replay.record.__name__ == "record"
    return {
        "torch": raised,
        "modules": sorted(sys.modules),
        "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "environment": {name: value for name, value in os.environ.items() if name not in task["variables"]},
    }
