"""Reads the command line of python -m benchmarks, and measures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import SUBJECTS
from npu_replay.cli.exits import ended
from npu_replay.options import Parser, at_least

ABOUT = "Measure what record and replay cost (about 5 min; --quick about 60 s)."


def _subjects(value: str) -> tuple[str, ...]:
    wanted = tuple(value.split(",")) if value else ()
    unknown = [name for name in wanted if name not in SUBJECTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(SUBJECTS)}")
    return wanted


def options(arguments: Sequence[str]) -> dict[str, Any]:
    """Read a command line into the arguments of benchmarks.run.main."""
    examples = "python -m benchmarks --quick", "python -m benchmarks --only router,step --out bench.json"
    reader = Parser("python -m benchmarks", ABOUT, examples, "docs/dev/performance.md")
    words = f"These alone, of {', '.join(SUBJECTS)}."
    reader.add_argument("--only", type=_subjects, default=(), metavar="ROW[,ROW]", help=words)
    reader.add_argument("--quick", action="store_true", help="Smaller sizes, few rounds: about 60 s.")
    words = "Rounds to take the median of; 50, or 5 with --quick."
    reader.add_argument("--pairs", type=at_least(1), metavar="N", help=words)
    reader.add_device()
    reader.add_report("JSON file for the numbers.")
    found = vars(reader.parse_args(arguments))
    found.pop("debug", None)
    pairs = found["pairs"] or (5 if found["quick"] else 50)
    return found | {"pairs": pairs, "as_json": found.pop("json")}


def main(arguments: Sequence[str]) -> int:
    """Measure, and return the exit code."""

    def measure() -> None:
        given = options(arguments)
        from benchmarks import run

        run.main(**given)

    return ended(measure, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
