"""ci/device.sh, tried without the machine that it is for: on the CPU and on the simulated NPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import npu_device
from ci_module import ci_module
from npu_replay import devices

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
device = ci_module("device")

no_accelerator = pytest.mark.skipif(devices.available() != ["cpu"], reason="an accelerator is here")


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["bash", str(ROOT / "ci" / "device.sh"), *arguments]
    environment["PYTHON"] = sys.executable
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


@no_accelerator
def test_without_an_accelerator_it_says_so_and_stops(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path / "device.json"))
    assert done.returncode == 2
    assert "torch finds no accelerator here" in done.stdout
    assert not (tmp_path / "device.json").exists()


@no_accelerator
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [
        pytest.param("cpu", "", 10, marks=pytest.mark.long),
        pytest.param(
            *("simulated", "simulated npu", 19),
            marks=pytest.mark.skipif(bool(npu_device.lacking()), reason=npu_device.lacking() or "-"),
        ),
    ],
)
def test_it_writes_a_report_that_names_what_was_tried_and_what_is_missing(
    kind: str, name: str, least: int, tmp_path: Path
) -> None:
    """Without Megatron-core on the path: that is said, and isn't taken for a pass or a failure."""
    out = tmp_path / "device.json"
    done = script("--device", kind, "--quick", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    assert len(ci_module("verified").row(report, "x")) == len(ci_module("verified").TITLES[report["kind"]])
    assert report["machine"]["name"] == name
    assert {part["part"]: part["result"] for part in report["parts"]} == {
        "test_core.py": "PASS",
        "doctor": "PASS",
        "smoke": "MISSING",
        "bench": "MISSING",
    }
    tests, *_, bench = report["parts"]
    assert tests["passed"] >= least
    assert "megatron.core can't be imported" in bench["why"]
    for path in (ROOT, tmp_path, Path.home()):
        assert f"{path}/" not in out.read_text()


def test_a_part_that_fails_or_hangs_takes_no_other_along(tmp_path: Path) -> None:
    bench = device.Bench(dict(os.environ), tmp_path, tmp_path)
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    wanted = [
        device.Part("fails", (), 60, ("-c", "import sys; print('it broke'); sys.exit(3)")),
        device.Part("hangs", (), 1, ("-c", hangs)),
        device.Part("crashes", (), 60, ("-c", "import os; os.abort()")),
        device.Part("lacks", ("no_such_module",), 60, ("-c", "")),
        device.Part("works", (), 60, ("-c", "import json; json.dump({'a': 1}, open(r'{out}', 'w'))")),
    ]
    results = [bench.run(part) for part in wanted]
    assert [result.result for result in results] == ["FAIL", "FAIL", "FAIL", "MISSING", "PASS"]
    assert [result.rc for result in results] == [3, None, -6, None, 0]
    assert (results[0].why, results[1].why) == ("it broke", "stopped after 1 s")
    assert results[4].found == {"a": 1}


CAPTURED = "[npu_replay] routes of 48 layers are captured on vllm-ascend 0.23.0. Checked"


@pytest.mark.parametrize(
    ("ascend", "mode", "line", "result"),
    [
        ("0.23.0", "eager", CAPTURED, "PASS"),
        ("0.23.0", "eager", "", "FAIL"),
        ("0.23.0", "off", "", "PASS"),
        ("", "eager", "", "PASS"),
    ],
)
def test_a_rollout_on_ascend_that_nobody_captured_is_no_pass(
    tmp_path: Path, ascend: str, mode: str, line: str, result: str
) -> None:
    wrote = json.dumps({"vllm_ascend": ascend, "mode": mode})
    code = f"print('(Worker pid=1) ' + {line!r}); open(r'{{out}}', 'w').write({wrote!r})"
    part = device.Part("rollout m eager", (), 60, ("-c", code))
    outcome = device.Bench(dict(os.environ), tmp_path, tmp_path).run(part)
    assert outcome.result == result
    assert outcome.found.get("captured", line) == line


def test_of_the_wheels_only_what_is_lacking_is_taken(tmp_path: Path) -> None:
    for name in ("numpy-1.0-py3-none-any.whl", "no_such_thing-1.0-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}/__init__.py", "")
    folders = device._unpacked(tmp_path, tmp_path / "to")
    assert [path.name for path in folders] == [tmp_path.name, "no-such-thing"]
    assert (folders[1] / "no_such_thing" / "__init__.py").exists()


def test_tests_that_were_all_skipped_are_no_pass(tmp_path: Path) -> None:
    file = tmp_path / "test_none.py"
    file.write_text("import pytest\n\n@pytest.mark.skip(reason='no such thing')\ndef test_it(): ...\n")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", "{out}", str(file))
    outcome = device.Bench(dict(os.environ), tmp_path, tmp_path).run(
        device.Part("test_none.py", (), 60, command)
    )
    assert outcome.result == "MISSING"
    assert outcome.skipped == ["test_it: no such thing"]
