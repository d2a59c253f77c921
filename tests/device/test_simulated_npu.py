"""The accelerator's tests on a simulated NPU, in a process that has that device.

test_core.py runs there in test_device_sh.py. What such a device can't do is listed in tests/npu_device.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import jobs
import npu_device
from choice import WHOLE
from npu_replay import devices

HERE = Path(__file__).parent
REASON = npu_device.lacking() or (
    f"{devices.available()[0]} is here, and a process has one accelerator"
    if devices.available() != ["cpu"]
    else ""
)
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.slow]

LEAST = {
    "test_spread": 23 if WHOLE else 17,
    "test_transformers": 9 if WHOLE else 2,
    "test_megatron": 5 if WHOLE else 1,
}
"""How many tests of each file have to run."""


@pytest.mark.megatron
@pytest.mark.first_release
@pytest.mark.timeout(900)
def test_the_accelerators_tests_pass_there(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    marks = "accelerator" if WHOLE else "accelerator and not long"
    arguments = ["-q", "-m", marks, f"--junitxml={results}", "-p", "no:xdist", "-p", "no:cacheprovider"]
    (done,) = jobs.start(
        "jobs:tests",
        {"arguments": [*arguments, *(str(HERE / f"{name}.py") for name in LEAST)]},
        env={"TORCHDYNAMO_DISABLE": "1"},
        path=[HERE / "stand_in"],
        timeout=900,
    )
    assert (done.code, done.answer) == (0, 0), done.output
    cases = ElementTree.parse(results).getroot().iter("testcase")
    ran = Counter(
        case.attrib["classname"].rpartition(".")[2] for case in cases if case.find("skipped") is None
    )
    for name, least in LEAST.items():
        assert ran[name] >= least, "tests were skipped there:\n" + done.output[-3000:]
