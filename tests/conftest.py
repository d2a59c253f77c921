"""What every test relies on: one thread, and Megatron's tests skipped where there is no Megatron."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

import npu_replay
from file_order import in_order

# Several workers share the cores, and one thread sums in one order.
torch.set_num_threads(1)


SLOW = ("slow", "distributed", "packaging", "long_file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if any(map(item.get_closest_marker, SLOW))}
    files = list(dict.fromkeys(item.path for item in items))
    places = in_order(files, slow, quick_run="not slow" in config.option.markexpr)
    items.sort(key=lambda item: places[item.path])
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        return
    skip = pytest.mark.skip(
        reason="megatron.core is not importable: put megatron-core on PYTHONPATH (ci/test.sh does)"
    )
    for item in items:
        if item.get_closest_marker("megatron") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _no_pip_in_this_process() -> Iterator[None]:
    """After pip no setuptools can be imported, and Megatron-core 0.16 needs it: which tests fail is luck."""
    was_there = "pip" in sys.modules
    yield
    assert was_there or "pip" not in sys.modules, (
        "a test of this file imported pip: run it in a process of its own"
    )


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Megatron-core in this process alone, on the CPU where there is no CUDA."""
    from npu_replay.smoke import megatron_model

    # On an accelerator sums are in order only when asked for; a CPU's always are.
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    with npu_replay.compat.cpu.lend():
        megatron_model.start()
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes in these tests are random, and no router's own: their overlap isn't judged."""
    monkeypatch.setenv("NPU_REPLAY_MIN_OVERLAP", "0")
