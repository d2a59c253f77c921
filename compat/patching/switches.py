"""The environment's two switches: NPU_REPLAY_DISABLE and NPU_REPLAY_STRICT are read here and nowhere else."""

from __future__ import annotations

import os

STRICT = "NPU_REPLAY_STRICT"


def disabled() -> bool:
    """Has the user turned all changes to other modules off?"""
    return os.environ.get("NPU_REPLAY_DISABLE", "") not in ("", "0")


def strict() -> bool:
    """Does a job stop where npu_replay can't do its part? NPU_REPLAY_STRICT=0 lets it go on without."""
    return os.environ.get(STRICT) != "0"
