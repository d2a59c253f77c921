"""Define the options that every command takes, and the parser of their command lines. Imports little."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from npu_replay import screen
from npu_replay.errors import ReplayError
from npu_replay.routes.atomic_file import check_place, write_whole
from npu_replay.tables import width, wrapped


class WrongOption(ReplayError):
    """Raised for a command line that can't be run: the command exits with 2."""


class Parser(argparse.ArgumentParser):
    """Parses the command line of `prog`, and raises WrongOption where that fails."""

    def __init__(self, prog: str, about: str, examples: Sequence[str], page: str, **more: Any) -> None:
        end = "\n".join(["Examples:", *(f"  {example}" for example in examples), f"More: {page}"])
        super().__init__(
            prog,
            description=wrapped(about, width()),
            epilog=end,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )
        # Read by `cli.exits.ended`, since a command line may also fail before it is parsed.
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="Show the traceback of an error.",
        )

    def error(self, message: str) -> NoReturn:
        raise WrongOption(f"{message}. {self.prog} --help says what it takes")

    def add_device(self) -> None:
        self.add_argument(
            "--device",
            choices=("auto", "cpu", "cuda", "npu"),
            default="auto",
            help="Where to run; auto takes an accelerator if there is one.",
        )

    def add_report(self, words: str, metavar: str = "FILE") -> None:
        """Add --json, --out and --force, which all commands take; `words` say what --out is for."""
        group = self.add_argument_group("the report")
        group.add_argument(
            "--json", action="store_true", help="Print one JSON document, and nothing else, on stdout."
        )
        group.add_argument("--out", type=Path, metavar=metavar, help=words)
        group.add_argument("--force", action="store_true", help="Overwrite what is there.")


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type for whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:  # argparse reports a word that is no number
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def check_out(out: Path | None, *, force: bool) -> None:
    """Check before the work starts that `out` can be written after it; raise WrongOption if not."""
    if out is None:
        return
    if out.is_dir():
        raise WrongOption("it can't be written: a folder is there", where=str(out))
    try:
        check_place(out, overwrite=force)
    except ReplayError as error:
        raise WrongOption(message(error)) from error


def write_out(out: Path | None, contents: bytes, *, force: bool) -> None:
    if out is not None:
        write_whole(out, contents, overwrite=force)
        screen.err().write(f"Wrote {out}\n")


def message(error: Exception) -> str:
    """Return an error's message without the prefix that it has in a log."""
    return str(error).removeprefix("[npu_replay] ")
