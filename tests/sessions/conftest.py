"""Models of zoo/beds.py: made once a file, and Megatron started where one of its stacks needs it."""

from collections.abc import Iterator

import pytest

from zoo.beds import bed_of


@pytest.fixture(autouse=True)
def megatron_if_needed(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("megatron"):
        request.getfixturevalue("megatron")


@pytest.fixture(scope="module", autouse=True)
def models_of_one_file() -> Iterator[None]:
    yield
    bed_of.cache_clear()
