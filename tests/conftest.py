"""What every test relies on: one thread, and Megatron's tests skipped where there is no Megatron."""

import gc
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import choice
import npu_replay
from progress import Progress
from zoo.toys import ToyBlocks, ToyRouters

# Several workers share the cores, and one thread sums in one order.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    choice.without_clocks()
    if getattr(config.option, "numprocesses", None):  # the process that hands the tests to workers
        config.pluginmanager.register(Progress(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread that have none of the tests that ci/test.sh asks for: of Megatron, or slow ones."""
    asked = str(config.option.markexpr)
    text = collection_path.read_text(encoding="utf-8") if collection_path.suffix == ".py" else ""
    if not text or collection_path.name in ("conftest.py", "__init__.py"):
        return None
    without_megatron = asked.startswith("megatron and ") and "mark.megatron" not in text
    without_slow = "(slow or packaging)" in asked and not re.search(r"mark\.(slow|packaging)", text)
    return True if without_megatron or without_slow else None


@pytest.hookimpl(tryfirst=True)  # before `-m long` is asked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    choice.mark_long(items)
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
