"""The product that a test runs on: the stand-in that lies here, and a real MindSpeed where there is one."""

from __future__ import annotations

import pytest

from on_mindspeed import processes


@pytest.fixture(params=[processes.STAND_IN, pytest.param(processes.REAL, marks=pytest.mark.mindspeed)])
def product(request: pytest.FixtureRequest) -> str:
    """processes.STAND_IN or processes.REAL."""
    if request.param == processes.REAL and not processes.real_mindspeed():
        pytest.skip("mindspeed is not importable: put MindSpeed and Megatron-LM's source tree on PYTHONPATH")
    return request.param
