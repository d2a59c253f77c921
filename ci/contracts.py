"""Does a released product still have what npu_replay leans on? Its source is parsed, not imported.

    python ci/contracts.py                      # the releases that CI checks
    python ci/contracts.py vllm==0.34.0         # a new release is held to what the newest had to keep
    python ci/contracts.py vllm-ascend==0.23.0 --source FOLDER    # a branch's source, held to that release's
    python ci/contracts.py --all                # every release that pip finds, from the first that is known
    python ci/contracts.py --all megatron-core  # ... of one product

What is leaned on stands in ci/contracts.toml. A contract that is broken is a line that says where: something
is gone, or there before its time. Then a decoder may read wrongly, or a shim find nothing to change: look at
that release before you replay what it sends. At run time shims look for names and signatures themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomllib
from packaging.version import Version
from source_stubs import differences

if TYPE_CHECKING:
    from releases import Index

HERE = Path(__file__).resolve().parent
KEPT, NOT_YET, BROKEN = "yes", "–", "BROKEN"


class Release:
    """The files of one release, by their path from the package's root, such as «vllm/outputs.py».

    Args:
        root: a folder, or a wheel, of which only the files that are asked for are fetched.
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        """A file's text; None where there is no such file."""
        file = self._root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def paths(self) -> list[str]:
        """All files."""
        return list(_files(self._root, ""))


def _files(folder: Path | zipfile.Path, path: str) -> Iterator[str]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _files(one, f"{path}{one.name}/")
        else:
            yield path + one.name


@dataclass(frozen=True)
class Clause:
    """What one file of the releases from `since` on, and before `until`, has to hold."""

    contract: str
    file: str
    code: str
    since: Version
    until: Version | None = None
    elsewhere: bool = False
    """Other releases may hold it too."""

    def covers(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def range(self) -> str:
        return f"from {self.since} on" if self.until is None else f"from {self.since} to before {self.until}"

    def broken(self, release: Release) -> list[str]:
        """One line for each thing that isn't there."""
        source = release.read(self.file)
        if source is None:
            return [f"no such file{_moved(self.file, release)}"]
        return differences(self.code, source)


@dataclass(frozen=True)
class Product:
    """A product's contracts."""

    package: str
    says: Mapping[str, str]
    """What each contract is about, by its name."""
    clauses: Sequence[Clause]
    first: Version
    """The first release that `--all` looks at."""
    ci: Sequence[Version]
    """Those that CI looks at."""
    candidates: bool = True
    """Whether `--all` looks at release candidates and nightly builds too."""

    def looks_at(self, version: Version) -> bool:
        """Is this a release for `--all`?"""
        return version >= self.first and (self.candidates or not version.is_prerelease)

    def check(self, version: Version, release: Release) -> tuple[dict[str, str], list[str]]:
        """What came of each contract, and a line for each break."""
        outcome, lines = {}, []
        for contract in self.says:
            broken = list(self._broken(contract, version, release))
            covered = any(clause.covers(version) for clause in self.clauses if clause.contract == contract)
            outcome[contract] = BROKEN if broken else KEPT if covered else NOT_YET
            lines += [f"{self.package} {version}: {line}" for line in broken]
        return outcome, lines

    def _broken(self, contract: str, version: Version, release: Release) -> Iterator[str]:
        clauses = [clause for clause in self.clauses if clause.contract == contract]
        covering = [clause for clause in clauses if clause.covers(version)]
        for clause in covering:
            yield from (f"{clause.file}: {line}" for line in clause.broken(release))
        for clause in clauses:
            # What is there before its time changes what a payload means just as well.
            if clause not in covering and not clause.elsewhere and not clause.broken(release):
                yield f"{clause.file}: holds «{contract}» as releases {clause.range()} do, and shouldn't"


def products(text: str) -> dict[str, Product]:
    """What a contracts.toml says."""
    found = {}
    for package, table in tomllib.loads(text).items():
        clauses = [
            Clause(
                contract,
                clause["file"],
                clause["code"],
                Version(clause["since"]),
                Version(clause["until"]) if "until" in clause else None,
                clause.get("elsewhere", False),
            )
            for contract, part in table["contract"].items()
            for clause in part["clause"]
        ]
        says = {contract: part["says"] for contract, part in table["contract"].items()}
        found[package] = Product(
            package,
            says,
            clauses,
            Version(table["first"]),
            [Version(one) for one in table["ci"]],
            table.get("candidates", True),
        )
    return found


def _moved(file: str, release: Release) -> str:
    """Where a file that isn't there may have gone: to the only other one of its name."""
    paths = release.paths()
    for ending in ("/".join(file.split("/")[-2:]), file.split("/")[-1]):
        found = [path for path in paths if path == ending or path.endswith("/" + ending)]
        if len(found) == 1:
            return f"; moved to {found[0]}?"
    return ""


def _asked(
    names: Sequence[str], everything: bool, known: Mapping[str, Product], index: Index
) -> Iterator[tuple[Product, Version]]:
    for name in names or known:
        package, _, version = name.partition("==")
        if package not in known:
            raise SystemExit(f"{name}: give PACKAGE or PACKAGE==VERSION, of {', '.join(known)}")
        product = known[package]
        if version:
            chosen = [Version(version)]
        elif everything:
            chosen = [one for one in index.versions(package) if product.looks_at(one)]
        else:
            chosen = list(product.ci)
        yield from ((product, one) for one in chosen)


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a contract is broken."""
    # Not above: it imports pip, after which no setuptools can be imported, and the tests import this module.
    from releases import Index

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", nargs="*", help="such as vllm==0.34.0, or vllm; none: all that CI checks")
    parser.add_argument("--all", action="store_true", help="every release that pip finds")
    parser.add_argument("--source", type=Path, help="its source lies there: a clone, or what was unpacked")
    options = parser.parse_args(arguments)
    if options.source and not (len(options.release) == 1 and "==" in options.release[0]):
        parser.error("--source is held to the contracts of one release: PACKAGE==VERSION")
    known = products((HERE / "contracts.toml").read_text(encoding="utf-8"))
    wrong = 0
    with Index() as index:
        for product, version in _asked(options.release, options.all, known, index):
            source = contextlib.nullcontext(options.source)
            with source if options.source else index.open(product.package, version) as root:
                outcome, lines = product.check(version, Release(root))
            wrong += len(lines)
            kept = sum(one == KEPT for one in outcome.values())
            absent = sum(one == NOT_YET for one in outcome.values())
            print(f"{product.package} {version}: {kept} kept, {absent} absent as expected", flush=True)
            for line in lines:
                print(line, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LookupError as error:
        sys.exit(f"ci/contracts.py: {error}")
