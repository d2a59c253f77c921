"""Activation: importing this does everything, once; `repatch` does it again with other arguments."""

from __future__ import annotations

from typing import Any

from torch_npu.contrib import transfer_to_npu  # noqa: F401 - first of all, as in the original

from mindspeed.args_utils import ARGUMENTS
from mindspeed.features_manager import MindSpeedFeaturesManager


def repatch(args: dict[str, Any]) -> None:
    ARGUMENTS.repatch(MindSpeedFeaturesManager, args)


repatch({})
