"""What verl's router replay warns of when it is imported after npu_replay."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import npu_replay
import transformers_4


def main(task: dict[str, Any]) -> dict[str, Any]:
    transformers_4.lend()
    with npu_replay.compat.cpu.lend(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name in ("router_replay_patch", "router_replay_utils"):
            importlib.import_module(f"verl.utils.megatron.{name}")
    filters = [str(one[1].pattern) for one in warnings.filters if one[1]]
    return {"said": [str(one.message) for one in said], "filters": filters}
