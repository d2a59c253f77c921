"""A process that loads npu_replay's entry points as verl 0.9 and vLLM do. It imports nothing of it itself."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

GROUPS = ("verl.plugins", "vllm.general_plugins")


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
        "finders": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
        "environment": {name: value for name, value in os.environ.items() if name not in task["variables"]},
    }
