"""The files in examples/: run as their docstrings say, in processes of their own, and what they print."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples").glob("*.py"))
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
LIMIT = 200
"""Seconds."""
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)*(?:e-?\d+)?")


def docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def command(file: Path) -> list[str]:
    """The command of the docstring, without what may be left out; this environment has its PYTHONPATH."""
    (line,) = re.findall(
        rf"(?m)^    (?:PYTHONPATH=\S+ )?((?:python|torchrun) .*examples/{file.name}.*)$", docstring(file)
    )
    launcher, *arguments = shlex.split(line, comments=True)
    return LAUNCHERS[launcher] + [argument for argument in arguments if not argument.startswith("[")]


def promised(file: Path) -> list[str]:
    """The lines that the docstring says it prints: its last block."""
    *_, block = re.findall(r"(?m)prints:\n\n((?:    .*\n?)+)", docstring(file))
    return plain(block)


def plain(text: str) -> list[str]:
    """Lines in which every number is `#` or, where it is zero, `0`."""

    def kind(match: re.Match[str]) -> str:
        return "#" if re.search("[1-9]", match.group().split("e")[0]) else "0"

    return [_NUMBER.sub(kind, line.strip()) for line in text.splitlines() if line.strip()]


def prints_what_it_promises(file: Path) -> None:
    """Assert that it ends well and prints the lines of its docstring, zeros where these have zeros."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command(file),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert [line for line in plain(done.stdout) if line in promised(file)] == promised(file), done.stdout
