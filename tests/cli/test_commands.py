"""The command line: help, options, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import command_line
import npu_replay
import npu_replay.inspection.compare
import npu_replay.inspection.inspection
from command_line import Result
from npu_replay import options


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "200")
    return command_line.invoke


def test_help_and_version(invoke: Callable[..., Result]) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    commands = ("doctor", "inspect", "compare", "smoke")
    assert all(command in result.stdout for command in commands)
    text = invoke("smoke", "--help").stdout
    assert all(choice in text for choice in ("auto", "cpu", "cuda", "npu"))
    assert invoke("--version").stdout.strip() == npu_replay.__version__


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What inspect was called with; it is replaced by a stand-in that notes it."""
    seen: dict[str, Any] = {}

    def look(path: Path, **given: Any) -> Any:
        seen.update(given, path=path)
        raise npu_replay.ReplayError("seen")

    monkeypatch.setattr(npu_replay.inspection.inspection, "inspect", look)
    return seen


INSPECT = {
    "path": Path("x"),
    "config": None,
    "engine": None,
    "version": "",
    "prompt_ids": None,
    "output_ids": None,
    "start": 0,
    "sample": None,
}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("inspect x --sample k", INSPECT | {"sample": "k"}),
        (
            "inspect --engine vllm x --engine-version 1 --config c --prompt-ids p --output-ids o --start 3",
            INSPECT
            | {"engine": "vllm", "version": "1", "config": Path("c"), "prompt_ids": Path("p")}
            | {"output_ids": Path("o"), "start": 3},
        ),
    ],
)
def test_options_are_passed_on_and_have_defaults(
    invoke: Callable[..., Result], looked: dict[str, Any], arguments: str, wanted: dict[str, Any]
) -> None:
    assert "seen" in invoke(*arguments.split()).stderr
    assert looked == wanted


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "x", "--start", "-1"),
        ("inspect", "x", "--start", "a"),
        ("inspect", "x", "--engine", "trt"),
        ("inspect", "x", "--sam", "k"),  # no abbreviation: a later option could take it away
        ("smoke", "--device", "tpu"),
        ("nothing",),
        ("demo",),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(
    invoke: Callable[..., Result], looked: dict[str, Any], arguments: tuple[str, ...]
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert looked == {}


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Make compare raise an error."""

    def failing(error: Exception) -> None:
        def compare_paths(*_: object) -> None:
            raise error

        monkeypatch.setattr(npu_replay.inspection.compare, "compare_paths", compare_paths)

    return failing


def test_a_replay_error_is_one_message_without_a_traceback(
    invoke: Callable[..., Result], fails: Callable[[Exception], None]
) -> None:
    fails(npu_replay.ReplayError("[it] went wrong", where="layer 3", expected=1, got=2, cause="a test"))
    result = invoke("compare", "x", "y")
    assert result.exit_code == 1
    assert "Error: layer 3: [it] went wrong. Expected 1, got 2. Usual cause: a test" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "--debug" in result.stderr


def test_an_error_is_folded_and_names_the_page_of_cures(
    invoke: Callable[..., Result], fails: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(npu_replay.ReplayError("routes and rows differ", expected="a " * 50, got=2, cause="a test"))
    monkeypatch.setenv("COLUMNS", "60")
    said = invoke("compare", "x", "y").stderr
    assert max(map(len, said.splitlines())) <= 60
    assert "docs/troubleshooting.md" in said.split("Symptoms and cures: ")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("compare x y --json", 1, "layer 3: wrong"),
        ("doctor --json --out nothing/out.json", 2, "can't be written"),
        ("smoke --json --tp 2", 2, "multiple of 2 processes"),
        ("inspect --json", 2, "arguments are required: FILE"),
        ("inspect nothing --json", 1, "nothing: there is no such file"),
        ("inspect file --json --out a.txt", 2, "Expected .png for the picture, or .json for the findings"),
        ("doctor --json --nothing", 2, "unrecognized arguments: --nothing"),
        ("nothing --json", 2, "invalid choice: 'nothing'"),
    ],
)
def test_under_json_a_failure_is_one_document(
    invoke: Callable[..., Result],
    fails: Callable[[Exception], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: str,
    code: int,
    words: str,
) -> None:
    fails(npu_replay.ReplayError("wrong", where="layer 3"))
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = invoke(*arguments.split())
    assert result.exit_code == code
    found = json.loads(result.stdout)
    assert list(found) == ["error"]
    assert words in found["error"]
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (npu_replay.ReplayError("wrong"), "--debug compare x y"),  # on either side of the command
        (npu_replay.ReplayError("wrong"), "compare x y --debug"),
        (ZeroDivisionError(), "compare x y"),  # a fault of ours keeps its traceback
    ],
)
def test_debug_and_a_fault_of_ours_let_the_error_through(
    invoke: Callable[..., Result], fails: Callable[[Exception], None], error: Exception, arguments: str
) -> None:
    fails(error)
    with pytest.raises(type(error)) as caught:
        invoke(*arguments.split())
    assert caught.value is error


def test_a_missing_package_leads_to_doctor(
    invoke: Callable[..., Result], fails: Callable[[Exception], None]
) -> None:
    fails(ModuleNotFoundError("No module named 'einops'"))
    result = invoke("compare", "x", "y")
    assert result.exit_code == 1
    assert "No module named 'einops'" in result.stderr
    assert "npu-replay doctor" in result.stderr


def test_without_a_command_it_says_which_there_are(invoke: Callable[..., Result]) -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "smoke" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "file", "--out", "file/out.png"),
        ("compare", "file", "file", "--out", "nothing/out.json"),
        ("doctor", "--out", "nothing/out.json"),
        ("smoke", "--out", "nothing/out.json"),
        *((*one, "--out", "folder", "--force") for one in (("inspect", "file"), ("doctor",), ("smoke",))),
    ],
    ids=" ".join,
)
def test_where_nothing_can_be_written_is_said_before_the_work(
    invoke: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(npu_replay.compat.probe, "require", lambda *_: None)
    Path("file").touch()
    Path("folder").mkdir()
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert re.search("can't be written", result.stderr)
    assert ".part" not in result.stderr  # a file that nobody has named
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder"}


def test_a_file_that_came_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("theirs")
    with pytest.raises(npu_replay.ReplayError, match="not overwritten"):
        options.write_out(tmp_path / "x.json", b"ours", force=False)
    assert (tmp_path / "x.json").read_text() == "theirs"


def test_without_megatron_smoke_says_what_doctor_says(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()  # another product's half of the name
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "npu_replay", "smoke"],
        text=True,
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "put Megatron-LM on PYTHONPATH" in said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
