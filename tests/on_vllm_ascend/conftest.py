"""A release of vllm-ascend, with its vLLM, is on the path: ci/vllm_ascend.sh puts it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from on_vllm_ascend.cases import AS_RELEASED, WITH_PLUGIN, Case

HERE = Path(__file__).parent
LIMIT = 1500
"""Seconds for all cases of a start."""

Told = dict[str, Any]


def release() -> str:
    """Of vllm-ascend on the path; "" where there is none."""
    try:
        return version("vllm-ascend")
    except PackageNotFoundError:
        return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm_ascend)
            item.add_marker(pytest.mark.timeout(2 * LIMIT))
            if not release():
                item.add_marker(
                    pytest.mark.skip("no vllm-ascend on PYTHONPATH: ci/vllm_ascend.sh fetches it")
                )


@pytest.fixture(scope="session")
def told(request: pytest.FixtureRequest) -> Callable[[str, str], Told]:
    """What the rig told of all cases of this session, AS_RELEASED or WITH_PLUGIN, on a kind of device."""
    wanted: dict[str, dict[str, dict[str, Case]]] = {}
    for item in request.session.items:
        path = getattr(item, "callspec", _Without).params.get("path")
        if path is not None:
            kind = AS_RELEASED if item.path.stem == "test_as_released" else WITH_PLUGIN
            wanted.setdefault(path.case.device, {}).setdefault(kind, {})[path.case.name] = path.case
    found: dict[str, dict[str, Told]] = {}

    def of(kind: str, device: str) -> Told:
        if device not in found:
            found[device] = run_rig(wanted[device], device)
            keep(found[device])
        return found[device][kind]

    return of


class _Without:
    params: dict[str, Any] = {}  # noqa: RUF012


def run_rig(wanted: dict[str, dict[str, Case]], device: str) -> dict[str, Told]:
    """The answers of one start, by kind and by case."""
    cases = {kind: [by[name].as_json() for name in sorted(by)] for kind, by in wanted.items()}
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "cases.json")
        asked.write_text(json.dumps(cases))
        command = [sys.executable, "-m", "on_vllm_ascend.rig", str(asked), folder, "--device", device]
        done = subprocess.run(
            command,
            env=os.environ
            | {
                "PYTHONPATH": f"{HERE.parent}:{os.environ['PYTHONPATH']}",
                "VLLM_VERSION": version("vllm"),  # unpacked, vLLM calls itself a dev build
                "VLLM_LOGGING_LEVEL": "ERROR",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )
        print(done.stdout)
        files = {kind: Path(folder, kind) for kind in cases}
        return {
            kind: json.loads(file.read_text()) if file.exists() else Broken(done.stdout[-4000:])
            for kind, file in files.items()
        }


class Broken(dict[str, Any]):
    """A rig that broke off: every case fails with what it said, and it isn't started again for each."""

    def __missing__(self, name: str) -> Any:
        pytest.fail(f"the rig ended before {name}:\n{self.said}")

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said


def keep(told: dict[str, Told]) -> None:
    """Write it into the folder that NPU_REPLAY_VLLM_ASCEND_RESULTS names, a file a release."""
    place = os.environ.get("NPU_REPLAY_VLLM_ASCEND_RESULTS")
    if place:
        path = Path(place, f"{release()}.json")
        kept = json.loads(path.read_text()) if path.exists() else {}
        for kind, found in told.items():
            kept.setdefault(kind, {}).update(found)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1, sort_keys=True))
