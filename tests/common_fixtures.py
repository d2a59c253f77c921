"""What a process of tests begins with: one thread, few garbage collections; the fixtures of many tests."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

import npu_replay
from zoo.toys import ToyBlocks, ToyRouters

# Several workers share the cores, and one thread sums in one order.
torch.set_num_threads(1)
# Each full collection looks at all of torch and transformers: by Python's own threshold a tenth of the time.
gc.set_threshold(20_000, 20, 50)


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


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """A collection looks at what the tests of a file make, not at all of torch: 0.4 s each."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def toy_routers() -> Iterator[None]:
    """The routers of toys.py are known; torch's top-k is its own afterwards."""
    natives = torch.topk, torch.Tensor.topk
    npu_replay.routers.register("toy", ToyRouters())
    npu_replay.routers.register("toy blocks", ToyBlocks())
    yield
    npu_replay.routers.unregister("toy")
    npu_replay.routers.unregister("toy blocks")
    assert (torch.topk, torch.Tensor.topk) == natives


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes in these tests are random, and no router's own: their overlap isn't judged."""
    monkeypatch.setenv("NPU_REPLAY_MIN_OVERLAP", "0")
