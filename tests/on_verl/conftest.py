"""verl in these tests: one release on the path (ci/verl.sh puts it there), as it was released.

What can't be installed beside the rest isn't there, and nothing stands in for it: vLLM, SGLang, Transformer
Engine and flash-attn are imported by verl where they are used.
"""

from __future__ import annotations

import pytest

import needed
import npu_replay

NEEDED = ("verl", "ray", "tensordict", "hydra")
CURE = "Put a verl release on PYTHONPATH (ci/verl.sh does) and install the verl-tests extra"
pytest_pycollect_makemodule, pytest_collection_modifyitems = needed.hooks(__file__, NEEDED, CURE, "verl")


@pytest.fixture(autouse=True, scope="module")
def installed_again() -> None:
    """Another file's tests in the same process may have ended with an uninstall()."""
    npu_replay.install()
