"""Prints the last line of ci/test.sh: passed or FAILED, how many tests on which release, how many seconds.

    python ci/last_line.py FOLDER EXIT_STATUS SECONDS SETUP_SECONDS

FOLDER has a folder for each release of Megatron-core, with the files that pytest's --junit-xml wrote there.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree


def on_release(folder: Path) -> str:
    """How many tests passed, failed and were skipped."""
    suites = [suite for file in folder.glob("*.xml") for suite in ElementTree.parse(file).iter("testsuite")]
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    counts = {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}
    told = [f"{count} {name}" for name, count in counts.items() if count or name == "passed"]
    return f"{', '.join(told)} on Megatron-core {folder.name}"


def main(results: str, status: str, seconds: str, setup_seconds: str) -> None:
    """Say FAILED by the exit status: a pytest that was killed leaves no file."""
    verdict = "passed" if status == "0" else "FAILED"
    releases = "; ".join(map(on_release, sorted(Path(results).iterdir()))) or "pytest left no results"
    print(f"{verdict}: {releases}; in {seconds} s, after {setup_seconds} s of setup (downloads included)")


if __name__ == "__main__":
    main(*sys.argv[1:])
