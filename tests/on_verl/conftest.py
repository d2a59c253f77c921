"""verl in these tests: one release on the path (ci/verl.sh puts it there), as it was released.

What can't be installed beside the rest isn't there, and nothing stands in for it: vLLM, SGLang, Transformer
Engine and flash-attn are imported by verl where they are used. The exception is one name of transformers 4
that verl 0.7.0 imports (`transformers_4_names`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import needed
import npu_replay
import transformers_4

NEEDED = ("verl", "ray", "tensordict", "hydra")
CURE = "Put a verl release on PYTHONPATH (ci/verl.sh does) and install the verl-tests extra"
pytest_pycollect_makemodule, pytest_collection_modifyitems = needed.hooks(__file__, NEEDED, CURE, "verl")


@pytest.fixture(autouse=True, scope="session")
def transformers_4_names() -> Iterator[None]:
    """verl 0.7.0 imports a class that transformers 5 has renamed, and uses it for vision models alone."""
    lent = transformers_4.lend()
    yield
    if lent:
        transformers_4.take_back()


@pytest.fixture(autouse=True, scope="module")
def installed_again() -> None:
    """Another file's tests in the same process may have ended with an uninstall()."""
    npu_replay.install()
