"""Reads the command line of python -m benchmarks, and measures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import SUBJECTS
from npu_replay.cli.exits import INTERRUPTED, exit_code, failed
from npu_replay.errors import ReplayError
from npu_replay.options import Device

ABOUT = "Measure what record and replay cost (about 2 min; --quick about 30 s)."


def _subjects(value: str) -> tuple[str, ...]:
    wanted = tuple(value.split(",")) if value else ()
    unknown = [name for name in wanted if name not in SUBJECTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(SUBJECTS)}")
    return wanted


def _rounds(value: str) -> int:
    if int(value) < 1:  # argparse itself says that a word is no int
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return int(value)


def options(given: list[str] | None = None) -> dict[str, Any]:
    """The arguments of benchmarks.run.main that a command line gives."""
    reader = argparse.ArgumentParser(prog="python -m benchmarks", description=ABOUT)
    reader.add_argument(
        "--only",
        type=_subjects,
        default=(),
        metavar="ROW[,ROW]",
        help=f"These alone, of {', '.join(SUBJECTS)}.",
    )
    reader.add_argument("--quick", action="store_true", help="Smaller sizes, few rounds: about 30 s.")
    reader.add_argument(
        "--pairs", type=_rounds, metavar="N", help="Rounds to take the median of; 50, or 5 with --quick."
    )
    reader.add_argument("--device", choices=[one.value for one in Device], default="auto")
    reader.add_argument("--json", action="store_true", dest="as_json", help="Print JSON.")
    reader.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the numbers.")
    reader.add_argument("--force", action="store_true", help="Overwrite what --out names.")
    found = vars(reader.parse_args(given))
    return found | {"pairs": found["pairs"] or (5 if found["quick"] else 50)}


def main() -> int:
    """Measure; show what a user can mend as one message."""
    given = options()
    from benchmarks.run import main as measure

    try:
        measure(**given)
    except (ReplayError, ModuleNotFoundError) as error:
        failed(error, as_json=given["as_json"])
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
