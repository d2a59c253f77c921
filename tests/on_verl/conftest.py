"""verl in these tests: one release on the path (ci/environment.sh has with_verl), as it was released.

What can't be installed beside the rest isn't there, and nothing stands in for it: vLLM, SGLang, Transformer
Engine and flash-attn are imported by verl where they are used. The exception is one name of transformers 4
that verl 0.7.0 imports (`transformers_4_names`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import npu_replay
import transformers_4

HERE = Path(__file__).parent
NEEDED = ("verl", "ray", "tensordict", "hydra")

Run = Callable[..., "Child"]


def _is_there(name: str) -> bool:
    """This folder is called verl too, and a folder without __init__.py is a package of no file."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


absent = [name for name in NEEDED if not _is_there(name)]


class _Skipped(pytest.Module):
    """A test file that can't even be imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(
            f"not importable: {', '.join(absent)}. Put a verl release on PYTHONPATH (with_verl of "
            "ci/environment.sh does) and install the verl-tests extra",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if absent else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.verl)


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


class Child:
    """A Python process that has ended well: what it wrote, and the JSON object in its last line."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.output = done.stdout
        self.errors = done.stderr

    @property
    def answer(self) -> Any:
        """What the script printed as JSON in its last line."""
        return json.loads(self.output.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def run_child(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a script of this folder in a fresh process: `run_child("worker.py", "argument", env={...})`.

    A variable that is None is taken out of the child's environment. A child that fails is an error with the
    end of what it wrote.
    """

    def run(
        script: str, *arguments: str, env: dict[str, str | None] | None = None, timeout: float = 580
    ) -> Child:
        folder = tmp_path_factory.mktemp("child")
        token = folder / "ray_token"  # Ray would write one into the home folder
        token.write_text(secrets.token_hex(32))
        changed = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_DEDUP_LOGS": "0",
            # A busy machine takes more than Ray's half a minute to start a node.
            "RAY_agent_register_timeout_ms": "150000",
            "RAY_raylet_start_wait_time_s": "150",
            "RAY_USAGE_STATS_ENABLED": "0",
            **(env or {}),
        }
        environment = {**os.environ, **{name: value for name, value in changed.items() if value is not None}}
        for name, value in changed.items():
            if value is None:
                environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, str(HERE / script), *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError(f"{script} failed:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
        return Child(done)

    return run
