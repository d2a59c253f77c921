"""The entry points of verl and vLLM: what they bring to a process that hasn't asked for replay.

A child process does with them what verl 0.9 and vLLM do, in an environment with npu_replay's metadata as
pyproject.toml has it, or with none of its entry points.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import jobs
import npu_replay_autoload
from entry_points_job import points, write
from npu_replay import ReplayError, environment
from npu_replay_autoload import vllm

pytestmark = pytest.mark.slow

OURS = ("npu_replay", "npu_replay_autoload")
OFF = {"NPU_REPLAY_DISABLE": "1", "NPU_REPLAY_STRICT": "lenient", "NPU_REPLAY_DISABEL": "1"}
"""Turned off, with slips that are errors where it is on."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[dict[bool, Path]]:
    """Folders for the path by whether npu_replay is installed there; each has a back end that fails."""
    folders = {}
    for installed in (True, False):
        folders[installed] = tmp_path / str(installed)
        write(folders[installed], "npu-replay", points() if installed else {})
        write(folders[installed], "torch-broken", {"torch.backends": {"broken": "broken_backend:load"}})
    (tmp_path / "broken_backend.py").write_text("raise ImportError('no driver')\n")
    return folders


def ended(folder: Path, variables: Mapping[str, str], **task: Any) -> jobs.Ended:
    none = dict.fromkeys([name for name in os.environ if name.startswith("NPU_REPLAY_")])
    ignored = [*variables, *none, "PYTHONPATH", "TMPDIR", "RAY_AUTH_TOKEN_PATH", "MASTER_PORT"]
    (done,) = jobs.start(
        "entry_points_job:process",
        task | {"variables": ignored},
        fresh=True,
        env={**none, **variables},
        path=[folder, folder.parent],
    )
    assert not done.problem, done.problem
    return done


def test_switched_off_a_process_is_as_where_it_is_not_installed(site: dict[bool, Path]) -> None:
    """Its modules, finders and environment, and what becomes of a torch whose device back end fails."""
    without = ended(site[False], {}).answer
    assert "broken" in without["torch"], "torch fails by itself"
    ours = ["npu_replay_autoload", "npu_replay_autoload.verl", "npu_replay_autoload.vllm"]
    for variables in (OFF, {"NPU_REPLAY_AUTOLOAD": " Off"}):
        here = ended(site[True], variables).answer
        assert [name for name in here["modules"] if name.partition(".")[0] in OURS] == ours
        here["modules"] = [name for name in here["modules"] if name not in ours]
        assert here == without


def test_a_job_turns_on_what_its_image_has_off_and_an_import_works_as_ever(site: dict[bool, Path]) -> None:
    asked = ended(site[True], {"NPU_REPLAY_AUTOLOAD": "1"})
    assert "npu_replay.compat.patching.install" in asked.answer["modules"]
    assert "_Finder" in asked.answer["finders"]
    assert "npu_replay.compat.vllm_ascend" not in asked.answer["modules"], "vLLM's has not been asked for"
    (line,) = [line for line in asked.output.splitlines() if line.startswith("DEBUG [npu_replay] ")]
    assert "loaded by an entry point" in line
    imported = ended(
        site[True], {"NPU_REPLAY_AUTOLOAD": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, user=True
    )
    assert "_Finder" in imported.answer["finders"]
    assert "loaded by an import" in imported.output


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ({"NPU_REPLAY_DISABLE": "maybe"}, "maybe"),  # another variable: below
        ({}, "its other half is missing"),
    ],
)
def test_what_fails_is_one_error_and_a_job_that_does_not_ask_goes_on(
    site: dict[bool, Path], variables: dict[str, str], cause: str
) -> None:
    if not variables:
        package = site[True] / "npu_replay"
        package.mkdir()
        (package / "__init__.py").write_text(f"raise ImportError('{cause}')")
    (line,) = [line for line in ended(site[True], variables).output.splitlines() if line.startswith("ERROR ")]
    assert cause in line
    assert "refused when its engine is built" in line


def test_an_error_of_the_environment_is_raised_where_replay_is_asked_for() -> None:
    code = """
import io, logging
logging.basicConfig(stream=(log := io.StringIO()), format="%(levelname)s %(message)s")
import npu_replay_autoload
npu_replay_autoload.load("verl")
from npu_replay.compat.patching import import_hook
try:
    import_hook.refuse_failures()
except RuntimeError as error:
    print(json.dumps([log.getvalue(), str(error)]))
"""
    logged, refused = jobs.printed(code, env={"NPU_REPLAY_STRICT": "lenient"})
    assert logged.count("ERROR ") == 1
    assert "lenient" in logged
    assert "lenient" in refused


def test_turned_off_an_import_changes_nothing_and_its_functions_are_there() -> None:
    code = """
before = list(sys.meta_path)
import npu_replay
names = [type(one).__name__ for one in sys.meta_path if one not in before]
print(json.dumps([names, npu_replay.record.__name__, len(npu_replay.report().patches)]))
"""
    assert jobs.printed(code, env=OFF) == [[], "record", 0]


def test_the_words_of_a_switch_are_the_ones_that_npu_replay_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, on in ((npu_replay_autoload.ON, True), (npu_replay_autoload.OFF, False)):
        for word in words:
            monkeypatch.setenv(environment.DISABLE, f" {word.title()}")
            assert environment.disabled() is on
            assert npu_replay_autoload.wanted() is not on


@pytest.mark.parametrize(
    ("value", "is_absent", "expected"),
    [
        *((value, True, nullcontext()) for value in ("0", " Off", "")),
        ("1", True, pytest.raises(ModuleNotFoundError, match="npu_replay")),
        ("maybe", False, pytest.raises(ReplayError, match="maybe")),
    ],
)
def test_vllms_entry_point_asks_npu_replay_where_it_is_to_capture(
    value: str, is_absent: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an engine that is to capture doesn't start with an unusable variable, or without npu_replay."""
    monkeypatch.setenv("NPU_REPLAY_VLLM_ASCEND", value)
    if is_absent:
        monkeypatch.setitem(sys.modules, "npu_replay.compat.vllm_ascend", None)
    with expected:
        vllm.register()
