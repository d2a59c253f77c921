"""The order in which the files of tests are handed to workers."""

from __future__ import annotations

from pathlib import Path


def in_order(files: list[Path], slow: set[Path], quick_run: bool) -> dict[Path, float]:
    """Give each file its place in the queue from which several workers take the next one.

    Files with slow tests come first, since a worker that takes one at the end works on alone. A quick run
    leaves the slowest of their tests out, and spreads them over the first three quarters of the other files:
    the progress that it shows rises from the beginning, and there are short files left for its end.
    """
    long = [file for file in files if file in slow]
    short = [file for file in files if file not in slow]
    apart = 0.75 * len(short) / len(long) if quick_run and long else 0
    places = {file: number * apart - 0.5 for number, file in enumerate(long)}
    return places | {file: float(number) for number, file in enumerate(short)}
