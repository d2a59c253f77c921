"""The tests in this folder that are marked `accelerator` run on the accelerator of this machine.

pytest -m accelerator       # on a CUDA or NPU machine; test_simulated_npu.py runs them on a simulated one

NPU_REPLAY_TEST_DEVICE=cpu runs those on the CPU that don't need another device (ci/device.sh does).
"""

import os
from collections.abc import Iterator

import pytest
import torch

from npu_replay import devices

ASKED = os.environ.get("NPU_REPLAY_TEST_DEVICE", "auto")
DEVICE = devices.pick(ASKED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE.type != "cpu" or ASKED == "cpu":
        return
    skip = pytest.mark.skip(reason="torch has no accelerator here (npu-replay doctor says why)")
    for item in items:
        if item.get_closest_marker("accelerator") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def accelerator(device: torch.device) -> torch.device:
    """The device, for a test that can't be run on the CPU instead."""
    if device.type == "cpu":
        pytest.skip("the CPU is here instead of an accelerator")
    return device


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Megatron-core in this process alone, on the accelerator."""
    from npu_replay.smoke import megatron_model

    torch.use_deterministic_algorithms(True, warn_only=True)
    with devices.megatron_on(DEVICE):
        megatron_model.start()
        yield
    torch.use_deterministic_algorithms(False)
