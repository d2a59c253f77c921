"""A release of vllm-ascend, with its vLLM, is on the path: with_ascend of ci/environment.sh."""

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
def told(request: pytest.FixtureRequest) -> Callable[[bool, str], Told]:
    """What the rig told of all cases of this session, with or without the plug-in, on a kind of device."""
    cases = {
        item.callspec.params["path"].case
        for item in request.session.items
        if isinstance(item, pytest.Function) and "path" in getattr(item, "callspec", _Without).params
    }
    found: dict[tuple[bool, str], Told] = {}

    def of(plugin: bool, device: str) -> Told:
        if (plugin, device) not in found:
            asked = sorted((case for case in cases if case.device == device), key=lambda case: case.name)
            found[plugin, device] = run_rig([case.as_json() for case in asked], plugin, device)
            keep(plugin, found[plugin, device])
        return found[plugin, device]

    return of


class _Without:
    params: dict[str, Any] = {}  # noqa: RUF012


def run_rig(cases: list[dict[str, Any]], plugin: bool, device: str) -> Told:
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "cases.json"), Path(folder, "results.json")
        asked.write_text(json.dumps(cases))
        command = [sys.executable, "-m", "on_vllm_ascend.rig", str(asked), str(answer), "--device", device]
        done = subprocess.run(
            [*command, *(["--plugin"] if plugin else [])],
            env=os.environ
            | {
                "PYTHONPATH": f"{HERE.parent}:{os.environ['PYTHONPATH']}",
                "VLLM_VERSION": version("vllm"),  # unpacked, vLLM calls itself a dev build
                **SETTINGS,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )
        print(done.stdout)
        if done.returncode or not answer.exists():
            return Broken(done.stdout[-4000:])
        return dict(json.loads(answer.read_text()))


class Broken(dict[str, Any]):
    """A rig that broke off: every case fails with what it said, and it isn't started again for each."""

    def __missing__(self, name: str) -> Any:
        pytest.fail(f"the rig ended before {name}:\n{self.said}")

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said


SETTINGS = {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}


def keep(plugin: bool, told: Told) -> None:
    """Write it into the folder that NPU_REPLAY_VLLM_ASCEND_RESULTS names, a file a release."""
    place = os.environ.get("NPU_REPLAY_VLLM_ASCEND_RESULTS")
    if place:
        path = Path(place, f"{release()}.json")
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept.setdefault("with the plug-in" if plugin else "as released", {}).update(told)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1, sort_keys=True))
