"""What a command takes, written once for two readers: typer, and argparse where typer isn't installed.

Light: every command imports it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from npu_replay import screen
from npu_replay.errors import ReplayError
from npu_replay.routes.atomic_file import check_place, write_whole
from npu_replay.tables import print_json

REPORT = "The report"


class Device(str, Enum):
    """Where to run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: in the code; on the command line with - for _.
        default: its type is the option's, except for None.
        words: for --help.
        kind: the type, where the default is None.
        metavar: what --help shows for a value.
        group: the heading in --help, where it isn't «Options».
    """

    name: str
    default: Any
    words: str
    kind: type | None = None
    metavar: str = "N"
    group: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def type(self) -> type:
        return self.kind or type(self.default)


DEVICE = Option("device", Device.auto, "Where to run; auto takes an accelerator if there is one.")


def report(out: str, metavar: str = "FILE") -> tuple[Option, ...]:
    """What all commands take, with `out` saying what they write."""
    return (
        Option("json", False, "Print one JSON document, and nothing else, on stdout.", group=REPORT),
        Option("out", None, out, kind=Path, metavar=metavar, group=REPORT),
        Option("force", False, "Overwrite what is there.", group=REPORT),
    )


class WrongOption(ReplayError):
    """A command line that can't be run as it stands: commands exit with 2."""


def check_out(out: Path | None, *, force: bool) -> None:
    """See before the work that `out` can be written after it.

    Raises:
        WrongOption: it can't.
    """
    try:
        if out is not None:
            check_place(out, overwrite=force)
    except ReplayError as error:
        raise WrongOption(message(error)) from error


def write_out(out: Path | None, contents: bytes, *, force: bool) -> None:
    """Write what --out asks for, if it does, and say so on stderr."""
    if out is not None:
        write_whole(out, contents, overwrite=force)
        screen.err().write(f"Wrote {out}\n")


def message(error: ReplayError) -> str:
    """Without the prefix that it has in a log."""
    return str(error).removeprefix("[npu_replay] ")


def ending(page: str, *examples: str) -> str:
    """The end of a --help: what to copy, and where more stands."""
    return "\n\n".join(["Examples:" if len(examples) > 1 else "Example:", *examples, f"More: {page}"])


def read(
    command: str, options: Sequence[Option], given: Sequence[str], about: str, end: str
) -> dict[str, Any]:
    """Read a command line without typer; exits 2 if it can't be read."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog=f"npu-replay {command}",
        description=about,
        epilog=end.replace("\n\n", "\n"),
        formatter_class=plain,
    )
    groups: dict[str, Any] = {"": parser}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group = groups[option.group]
        if option.type is bool:
            group.add_argument(option.flag, action="store_true", help=option.words)
        elif issubclass(option.type, Enum):
            choices = [one.value for one in option.type]
            group.add_argument(option.flag, choices=choices, default=option.default.value, help=option.words)
        else:
            group.add_argument(
                option.flag,
                type=option.type,
                default=option.default,
                metavar=option.metavar,
                help=option.words,
            )
    parser.as_json = "--json" in given
    return vars(parser.parse_args(given))


class _Parser(argparse.ArgumentParser):
    as_json = False

    def error(self, message: str) -> NoReturn:
        if self.as_json:
            print_json({"error": message})
        super().error(message)
