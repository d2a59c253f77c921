"""The command line in this process: help, options, errors, reports. Those in processes: test_output.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import command_line
import npu_replay
import npu_replay.inspection.compare
import npu_replay.inspection.inspection
from npu_replay import RoutedExperts
from npu_replay.cli import exits

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "inspect", "compare", "smoke")
REPORTS = ("inspect a.routes", "compare a.routes b.routes")
Invoke = Callable[[str], command_line.Result]
Fails = Callable[[Exception], None]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Runs a command line in a folder with two files of routes."""
    generator = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        ids = torch.rand(40, 3, 16, generator=generator).topk(4).indices
        RoutedExperts(ids=ids, layers=range(3), num_experts=16).save(tmp_path / f"{name}.routes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda line: command_line.invoke(*line.split())


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Make compare raise an error."""
    compare = npu_replay.inspection.compare
    return lambda error: monkeypatch.setattr(compare, "compare_paths", mock.Mock(side_effect=error))


# Help and options


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_help_fits_and_ends_with_what_to_copy_and_its_page(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("COLUMNS")
    helps = {name: invoke(f"{name} --help").stdout for name in COMMANDS}
    result = invoke(f"{command} --help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    words = " ".join(result.stdout.split())
    examples = words.split("Examples: ")[1].split(" More: ")[0]
    shown = re.findall(r"(?:npu-replay|npu_replay) (\w+)(.*?)(?= npu-replay| torchrun| python|$)", examples)
    assert len(shown) == 2
    for name, rest in shown:
        assert name == command or not command
        flags = re.findall(r"--[\w-]+", rest)
        assert [flag for flag in flags if f"{flag} " not in helps[name].split("Examples:")[0]] == []
    assert (ROOT / words.split(" More: ")[1].split()[0]).is_file()
    if command:
        report = result.stdout.split("the report:\n")[1].split("\n\n")[0]
        assert re.findall(r"--[\w-]+", report) == ["--json", "--out", "--force"]
        assert "--debug" in result.stdout
    else:
        assert all(name in result.stdout for name in COMMANDS)


def test_version_devices_and_what_no_command_says(invoke: Invoke) -> None:
    assert invoke("--version").stdout.strip() == npu_replay.__version__
    assert "{auto,cpu,cuda,npu}" in invoke("smoke --help").stdout
    nothing = invoke("")
    assert (nothing.exit_code, "smoke" in nothing.stdout) == (2, True)


def test_options_are_passed_on_and_have_defaults(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect = mock.Mock(side_effect=npu_replay.ReplayError("seen"))
    monkeypatch.setattr(npu_replay.inspection.inspection, "inspect", inspect)
    assert "seen" in invoke("inspect x --sample k").stderr
    nothing = dict.fromkeys(("config", "prompt_ids", "output_ids"))
    inspect.assert_called_with(Path("x"), version="", start=0, sample="k", **nothing)
    options = "--engine-version 1 --config c --prompt-ids p --output-ids o --start 3"
    assert "seen" in invoke(f"inspect x {options}").stderr
    files = {"config": Path("c"), "prompt_ids": Path("p"), "output_ids": Path("o")}
    inspect.assert_called_with(Path("x"), version="1", start=3, sample=None, **files)


# Errors


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("compare x y", 1, "layer 3: [it] went wrong. Expected 1, got 2. Usual cause: a test"),
        ("doctor --out nothing/out.json", 2, "can't be written"),
        ("smoke --out . --force", 2, "a folder is there"),
        ("smoke --tp 2", 2, "multiple of 2 processes"),
        ("inspect", 2, "arguments are required: FILE"),
        ("inspect nothing", 1, "nothing: there is no such file"),
        ("inspect a.routes --start -1", 2, "-1 is less than 0"),
        ("smoke --device tpu", 2, "invalid choice: 'tpu'"),
        ("inspect a.routes --sam k", 2, "unrecognized"),  # a later option could take an abbreviation away
        ("doctor --nothing", 2, "unrecognized arguments: --nothing"),
        ("demo", 2, "invalid choice: 'demo'"),
    ],
)
def test_a_failure_is_one_message_and_under_json_one_document_too(
    invoke: Invoke, fails: Fails, monkeypatch: pytest.MonkeyPatch, line: str, code: int, words: str
) -> None:
    fails(npu_replay.ReplayError("[it] went wrong", where="layer 3", expected=1, got=2, cause="a test"))
    if code == exits.WRONG:  # so it is refused before anything runs
        monkeypatch.setattr(npu_replay.inspection.inspection, "inspect", pytest.fail)
    plain = invoke(line)
    asked = invoke(f"{line} --json")
    for result in (plain, asked):
        assert result.exit_code == code
        assert words in " ".join(result.stderr.split())
        assert "Traceback" not in result.output
        assert ("--debug shows" in result.stderr) == (code == exits.FAULT)
    assert plain.stdout == ""
    document = json.loads(asked.stdout)
    assert list(document) == ["error"]
    assert words in document["error"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (npu_replay.ReplayError("wrong"), "--debug compare x y"),  # on either side of the command
        (npu_replay.ReplayError("wrong"), "compare x y --debug"),
        (ZeroDivisionError(), "compare x y"),  # a fault of ours keeps its traceback
    ],
)
def test_debug_and_a_fault_of_ours_let_the_error_through(
    invoke: Invoke, fails: Fails, error: Exception, line: str
) -> None:
    fails(error)
    with pytest.raises(type(error)) as caught:
        invoke(line)
    assert caught.value is error


def test_the_codes_are_those_of_the_page() -> None:
    codes = re.findall(r"(?m)^\| (\d+) \| ", (ROOT / "docs" / "cli.md").read_text())
    assert list(map(int, codes)) == [0, exits.FAULT, exits.WRONG, exits.INTERRUPTED, exits.CLOSED_PIPE]


# Reports


@pytest.mark.parametrize("line", REPORTS)
def test_out_is_the_document_of_json_in_a_file(invoke: Invoke, line: str) -> None:
    done = invoke(f"{line} --json --out found.json")
    assert done.exit_code == 0
    assert done.stderr == "Wrote found.json\n"
    assert json.loads(Path("found.json").read_text()) == json.loads(done.stdout)
    again = invoke(f"{line} --out found.json")
    assert (again.exit_code, again.stdout) == (2, "")
    assert "--force" in again.stderr
    assert invoke(f"{line} --out found.json --force").exit_code == 0


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("line", REPORTS)
def test_a_report_fits_and_nothing_is_cut(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, line: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns) if columns != 80 else "")
    done = invoke(line)
    assert [text for text in done.stdout.splitlines() if len(text) > columns or text != text.rstrip()] == []
    assert "\x1b" not in done.output
    assert "…" not in done.output
    assert done.stderr == ""


@pytest.mark.parametrize(
    "line",
    [
        "inspect a.routes --out a.routes/out.json",
        "compare a.routes b.routes --out nothing/out.json",
        "smoke --out nothing/out.json",
    ],
)
def test_where_nothing_can_be_written_is_said_before_the_work(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    monkeypatch.setattr(npu_replay.compat.probe, "require", lambda *_: None)
    result = invoke(line)
    assert result.exit_code == 2
    assert "can't be written" in result.stderr
    assert ".part" not in result.stderr  # a file that nobody has named
    assert {path.name for path in tmp_path.rglob("*")} == {"a.routes", "b.routes"}
