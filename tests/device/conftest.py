"""The tests in this folder that are marked `accelerator` run on the accelerator of this machine.

pytest -m accelerator       # on a CUDA or NPU machine; test_simulated_npu.py runs them on a simulated one
"""

from collections.abc import Iterator

import pytest
import torch

from npu_replay import devices

DEVICE = devices.pick("auto")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "accelerator: needs an accelerator that torch can use, CUDA or NPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE.type != "cpu":
        return
    skip = pytest.mark.skip(reason="torch has no accelerator here (npu-replay doctor says why)")
    for item in items:
        if item.get_closest_marker("accelerator") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Megatron-core in this process alone, on the accelerator."""
    from npu_replay.demo import megatron_model

    torch.use_deterministic_algorithms(True, warn_only=True)
    with devices.megatron_on(DEVICE):
        megatron_model.start()
        yield
    torch.use_deterministic_algorithms(False)
