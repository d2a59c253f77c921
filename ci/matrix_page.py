"""docs/dev/matrix.md: which release has what, made from the results in docs/dev/matrix/, never by hand.

python ci/matrix_page.py     # writes it anew from what is there; ci/matrix.sh does so too
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import pages

import matrix

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from capabilities import CAPABILITIES  # noqa: E402  it lies beside the tests that are marked with it

PAGE = ROOT / "docs" / "dev" / "matrix.md"
FOLDER = ROOT / "docs" / "dev" / "matrix"
MARKS = "<!-- matrix: written by ci/matrix.sh -->", "<!-- end of matrix -->"

NATIVE, SHIMMED, MISSING, FAILS = "native", "shimmed", "missing", "FAILS"


@dataclass(frozen=True)
class Shown:
    """What a run showed of one release."""

    python: str
    torch: str
    cases: str
    """`all`, or `a choice`."""
    passed: int
    skipped: int
    day: str
    cells: Mapping[str, str]
    """Capability to native, shimmed, missing or FAILS."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why one is missing, as its tests said when they were skipped."""

    def write(self, name: str, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def read(folder: Path = FOLDER) -> dict[str, Shown]:
    """What is known, by the name of the release."""
    return {path.stem: Shown(**json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")}


def tables(releases: Sequence[matrix.Release], known: Mapping[str, Shown]) -> str:
    """What stands between the marks: what the releases of each product have, and what they were run with."""
    parts: list[str] = []
    for package, group in groupby(releases, key=lambda release: release.package):
        ours = [release for release in group if release.name in known]
        if ours:
            parts += [f"### {package}", _capabilities(ours, known)]
    return "\n\n".join([*parts, "### What each was run with", _runs(releases, known)])


def _capabilities(releases: Sequence[matrix.Release], known: Mapping[str, Shown]) -> str:
    """A row a capability. Neighbours of which all is the same share a column."""
    notes: list[str] = []

    def note(text: str) -> str:
        if text not in notes:
            notes.append(text)
        return f"({notes.index(text) + 1})"

    columns = [list(same) for _, same in groupby(releases, key=lambda one: _shown(one, known[one.name]))]
    titles = ["", *(_title(column, known, note) for column in columns)]
    rows = []
    for name, capability in CAPABILITIES[releases[0].product].items():
        row = [capability.says]
        for column in columns:
            shown = known[column[0].name]
            cell, why = shown.cells.get(name, "not run"), shown.reasons.get(name)
            row.append(f"{cell} {note(why)}" if why else cell)
        rows.append(row)
    said = [f"{number}. {text[0].upper()}{text[1:].rstrip('.')}." for number, text in enumerate(notes, 1)]
    return "\n".join([pages.table(titles, rows), "", *said]).rstrip()


def _shown(release: matrix.Release, shown: Shown) -> tuple[object, ...]:
    """What a column says."""
    return shown.cells, shown.reasons, _forced(release, shown)


def _forced(release: matrix.Release, shown: Shown) -> str:
    """What is to be said of a release that ran on an older Python than it asks for."""
    if not release.is_forced_onto(shown.python):
        return ""
    older = shown.python.rpartition(".")[0]
    return f"it says that it needs Python {release.python}, and was forced onto {older}"


def _title(column: Sequence[matrix.Release], known: Mapping[str, Shown], note: Callable[[str], str]) -> str:
    first, last = column[0], column[-1]
    title = first.version if first is last else f"{first.version} to {last.version}"
    forced = _forced(first, known[first.name])
    return f"{title} {note(forced)}" if forced else title


def _runs(releases: Sequence[matrix.Release], known: Mapping[str, Shown]) -> str:
    titles = ["", "Python", "torch", "cases", "tests passed", "not for this release", "day"]
    rows = []
    for release in releases:
        if (shown := known.get(release.name)) is not None:
            passed, skipped = str(shown.passed), str(shown.skipped)
            name = f"{release.package} {release.version}"
            rows.append([name, shown.python, shown.torch, shown.cases, passed, skipped, shown.day])
    return pages.table(titles, rows)


def write() -> None:
    """Write docs/dev/matrix.md anew from the results that are there."""
    pages.rewrite(PAGE, MARKS, tables(matrix.read().releases, read()))


if __name__ == "__main__":
    write()
