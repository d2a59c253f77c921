"""What the commands print, run as people run them: into a pipe, a terminal, a log, and a reader that goes."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_replay import RoutedExperts

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "inspect", "compare", "smoke")
ON_MEGATRON = {
    "smoke": ("--recompute", "--device", "cpu"),
}
"""The smallest case of each, of those that take a while and import others' code."""
AT_ONCE = {"doctor": (), "inspect": ("a.routes",), "compare": ("a.routes", "b.routes")}
NOISE = """
import logging, os, warnings
from npu_replay import devices
pick = devices.pick

def noisy(name):
    print("noise of print")
    os.write(1, b"noise of C on stdout\\n")
    os.write(2, b"noise of C on stderr\\n")
    warnings.warn("noise of warnings")
    logging.getLogger("torch").warning("noise of a logger")
    return pick(name)

devices.pick = noisy
from npu_replay.cli import main
main()
"""
NOISES = ("of print", "of C on stdout", "of C on stderr", "of warnings", "of a logger")
megatron = (pytest.mark.megatron, pytest.mark.first_release, pytest.mark.slow)
every = pytest.mark.parametrize(
    "command", [*AT_ONCE, *(pytest.param(one, marks=megatron) for one in ON_MEGATRON)]
)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        ids = torch.rand(40, 3, 16, generator=generator).topk(4).indices
        RoutedExperts(ids=ids, layers=range(3), num_experts=16).save(tmp_path / f"{name}.routes")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    gone = ("COLUMNS", "NO_COLOR", "RANK", "WORLD_SIZE", "PYTHONUNBUFFERED")
    path = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    known = {name: value for name, value in os.environ.items() if name not in gone}
    return known | {"TERM": "xterm", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)} | more


def run(desk: Path, *arguments: str, code: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    how = ["-c", code] if code else ["-m", "npu_replay"]
    return subprocess.run(
        [sys.executable, *how, *arguments],
        cwd=desk,
        env=environment(**variables),
        text=True,
        capture_output=True,
        check=False,
        timeout=250,
    )


def smallest(command: str) -> tuple[str, ...]:
    return (command, *(AT_ONCE | ON_MEGATRON)[command])


def in_a_terminal(desk: Path, columns: int, *arguments: str, **variables: str) -> str:
    """What a terminal of so many columns is sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    job = subprocess.Popen(
        [sys.executable, "-m", "npu_replay", *arguments],
        cwd=desk,
        env=environment(**variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    sent = b""
    try:
        while piece := os.read(ours, 65536):
            sent += piece
    except OSError:  # the other side is closed
        pass
    job.wait(timeout=250)
    os.close(ours)
    return sent.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def lines_of(text: str) -> list[str]:
    """Without those of one long word, such as a path, which stays whole."""
    return [line for line in text.splitlines() if len(line.split()) > 1]


# --help


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    here = tmp_path_factory.mktemp("help")
    found = {command: run(here, *command.split(), "--help") for command in ("", *COMMANDS)}
    assert {one.returncode for one in found.values()} == {0}
    return {command: one.stdout for command, one in found.items()}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_help_fits_and_ends_with_what_to_copy_and_its_page(helps: dict[str, str], command: str) -> None:
    text = helps[command]
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    words = " ".join(text.split())
    examples = words.split("Examples: ")[1].split(" More: ")[0]
    shown = re.findall(r"(?:npu-replay|npu_replay) (\w+)(.*?)(?= npu-replay| torchrun| python|$)", examples)
    assert len(shown) == 2
    for name, rest in shown:
        flags = re.findall(r"--[\w-]+", rest)
        assert name == command or not command
        assert [flag for flag in flags if f"{flag} " not in helps[name].split("Examples:")[0]] == []
    page = words.split(" More: ")[1].split()[0]
    assert (ROOT / page).is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_same_words_for_its_report(helps: dict[str, str], command: str) -> None:
    report = helps[command].split("the report:\n")[1]
    assert "Print one JSON document, and nothing else, on stdout." in report
    assert re.findall(r"--[\w-]+", report.split("\n\n")[0]) == ["--json", "--out", "--force"]
    assert "--debug" in helps[command]


# --json, --out


@every
def test_json_is_one_document_and_alone_on_stdout(desk: Path, command: str) -> None:
    noisy = command in ON_MEGATRON
    done = run(desk, *smallest(command), "--json", code=NOISE if noisy else "")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert "noise" not in done.stderr
    if noisy:
        log = Path(re.findall(r"others go to (.+)", done.stderr)[0])
        assert not log.exists(), "all passed, so nobody needs it"


def test_what_others_print_is_in_the_log_of_a_smoke_that_failed(desk: Path) -> None:
    done = run(desk, "smoke", "--device", "npu", "--json", code=NOISE)
    assert done.returncode == 1, done.stderr
    assert [one["result"] for one in json.loads(done.stdout)["results"]] == ["FAIL"]
    log = Path(re.findall(r"others go to (.+)", done.stderr)[0])
    told = log.read_text()
    log.unlink()
    assert [one for one in NOISES if f"noise {one}" not in told] == []
    assert "noise" not in done.stderr
    assert "npu-replay-smoke" in log.name


@pytest.mark.parametrize("command", AT_ONCE)
def test_out_is_the_same_document_in_a_file(desk: Path, command: str) -> None:
    done = run(desk, *smallest(command), "--json", "--out", "found.json")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "Wrote found.json"
    assert json.loads((desk / "found.json").read_text()) == json.loads(done.stdout)
    again = run(desk, *smallest(command), "--out", "found.json")
    assert (again.returncode, again.stdout) == (2, "")
    assert "--force" in again.stderr
    assert run(desk, *smallest(command), "--out", "found.json", "--force").returncode == 0


# Width, colours, progress


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        *((command, "") for command in AT_ONCE),
        *(
            pytest.param(command, columns, marks=megatron)
            for command, columns in [
                ("smoke", ""),
            ]
        ),
    ],
)
def test_in_a_pipe_all_fits_without_colours_and_nothing_is_cut(
    desk: Path, command: str, columns: str
) -> None:
    done = run(desk, *smallest(command), **({"COLUMNS": columns} if columns else {}))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "…" not in done.stdout
    assert "\r" not in done.stdout + done.stderr
    assert [line for line in lines_of(done.stdout) if len(line) > int(columns or 80)] == []
    assert not any(line != line.rstrip() for line in done.stdout.splitlines())
    assert "Warning" not in done.stdout + done.stderr.replace("Warnings of others", "")


@pytest.mark.parametrize("command", AT_ONCE)
def test_a_narrow_terminal_has_colours_and_no_line_too_long(desk: Path, command: str) -> None:
    sent = in_a_terminal(desk, 60, *smallest(command))
    assert "\x1b[1m" in sent
    assert [line for line in lines_of(plain(sent)) if len(line) > 60] == []
    assert "…" not in sent
    grey = in_a_terminal(desk, 60, *smallest(command), NO_COLOR="1")
    assert "\x1b" not in grey
    untimed = [re.sub(r"\d+\.\d+ s", "", plain(one)) for one in (sent, grey)]
    assert untimed[0] == untimed[1]


# How a command ends


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("inspect", "a.routes"), 0),
        (("compare", "a.routes", "b.routes"), 0),
        (("inspect", "nothing"), 1),
        (("compare", "a.routes", "nothing"), 1),
        (("inspect",), 2),
        (("inspect", "a.routes", "--out", "nothing/x.png"), 2),
        (("smoke", "--tp", "2"), 2),
        (("smoke", "--nothing"), 2),
        (("nothing",), 2),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else str(one),
)
def test_exit_codes_mean_the_same_everywhere(desk: Path, arguments: tuple[str, ...], code: int) -> None:
    done = run(desk, *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_the_codes_are_those_of_the_page() -> None:
    from npu_replay.cli import exits

    told = re.findall(r"(?m)^\| (\d+) \| ", (ROOT / "docs" / "cli.md").read_text())
    codes = [exits.FAULT, exits.WRONG, exits.INTERRUPTED, exits.CLOSED_PIPE]
    assert list(map(int, told)) == [0, *codes]


SLEEPS = """
import sys, time
from npu_replay.doctor import diagnose

def waits(imports):
    sys.stderr.write("waiting\\n")
    time.sleep(60)

diagnose.diagnose = waits
from npu_replay.cli import main
main()
"""


def interrupted(desk: Path, how: Sequence[str], word: str) -> tuple[int, str]:
    """Exit code and what was complained of, after Ctrl-C as soon as `word` is on stderr."""
    job = subprocess.Popen(
        [sys.executable, *how],
        cwd=desk,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A job in the background of a script ignores Ctrl-C, and so would what it starts.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert job.stderr
    said = ""
    for line in job.stderr:
        said += line
        if word in line:
            break
    job.send_signal(signal.SIGINT)
    said += job.communicate(timeout=60)[1]
    return job.returncode, said


def test_ctrl_c_ends_without_a_traceback(desk: Path) -> None:
    code, said = interrupted(desk, ["-c", SLEEPS, "doctor"], "waiting")
    assert code == 130
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "a.routes"),
        ("compare", "a.routes", "b.routes", "--json"),
        ("doctor",),
        ("compare", "--help"),
        ("--version",),
    ],
    ids=" ".join,
)
def test_a_reader_that_goes_leaves_no_traceback(desk: Path, arguments: tuple[str, ...]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as pipe:
        done: subprocess.CompletedProcess[Any] = subprocess.run(
            [sys.executable, "-m", "npu_replay", *arguments],
            cwd=desk,
            env=environment(),
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=100,
        )
    assert done.stderr == ""
    assert done.returncode == 141
