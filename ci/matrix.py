"""The releases of ci/matrix.toml, and what pip has to be asked for to get one. The scripts ask it:

    python ci/matrix.py names [NAME ...]            # what these names mean, one release a line; no name: all
    python ci/matrix.py tier parallel               # the releases of a tier
    python ci/matrix.py pip megatron 0.18.0         # pip's arguments for a release
    python ci/matrix.py beside megatron 0.18.0      # what has to lie beside it

A name is a release (0.15.3), or product and release (megatron-0.15.3).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

TOML = Path(__file__).resolve().with_name("matrix.toml")
KEYS = {"python", "beside"}


@dataclass(frozen=True)
class Release:
    """One release of one product."""

    package: str
    version: str
    python: str = ""  # the oldest that it says it runs on, where that is newer than the tests'
    beside: tuple[str, ...] = ()

    @property
    def product(self) -> str:
        """`megatron` or `transformers`: its folder in .work, and the first word of its name."""
        return self.package.partition("-")[0]

    @property
    def name(self) -> str:
        return f"{self.product}-{self.version}"

    def is_forced_onto(self, python: str) -> bool:
        """Does it say that this Python, such as 3.11.7, is too old?"""
        asked, there = (tuple(map(int, version.split(".")[:2])) for version in (self.python or "0.0", python))
        return there < asked

    def pip_arguments(self) -> list[str]:
        """What `pip install --target` gets. Its own requirements are left out: they are many."""
        force = ["--ignore-requires-python", "--python-version", self.python, "--only-binary=:all:"]
        forced = self.is_forced_onto(platform.python_version())
        return ["--no-deps", *(force if forced else []), f"{self.package}=={self.version}"]


@dataclass(frozen=True)
class Matrix:
    """What ci/matrix.toml says."""

    releases: tuple[Release, ...]
    tiers: Mapping[str, tuple[Release, ...]]

    def of(self, names: Iterable[str]) -> list[Release]:
        """The releases of these names, in the order of the file; all if there is no name.

        Raises:
            ValueError: a name that means none of them; it names all.
        """
        asked = set(names)
        releases = [release for release in self.releases if {release.name, release.version} & asked]
        known = {word for release in releases for word in (release.name, release.version)}
        if unknown := sorted(asked - known):
            every = ", ".join(release.name for release in self.releases)
            raise ValueError(f"ci/matrix.toml has no {', '.join(unknown)}. It has {every}")
        return releases if asked else list(self.releases)

    def one(self, product: str, version: str) -> Release:
        """The release of this product; a ValueError if it isn't in the file."""
        return self.of([f"{product}-{version}"])[0]


def read(path: Path = TOML) -> Matrix:
    """What the file says.

    Raises:
        ValueError: a key that isn't known, or a tier of a release that isn't there.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    tiers = tables.pop("tiers", {})
    releases = []
    for package, lines in tables.items():
        for version, line in lines.items():
            if unknown := sorted(line.keys() - KEYS):
                raise ValueError(f"{package} {version}: {', '.join(unknown)} isn't known; {sorted(KEYS)} are")
            beside = tuple(line.get("beside", ()))
            releases.append(Release(package, version, line.get("python", ""), beside))
    matrix = Matrix(tuple(releases), {})
    return Matrix(matrix.releases, {tier: tuple(matrix.of(names)) for tier, names in tiers.items()})


def main(arguments: Sequence[str]) -> int:
    """Print what a script asked for; return 2 where there is no answer."""
    asked, *names = arguments
    matrix = read()
    try:
        if asked == "names":
            print(*(f"{release.product} {release.version}" for release in matrix.of(names)), sep="\n")
        elif asked == "tier":
            print(*(release.version for release in matrix.tiers[names[0]]), sep="\n")
        elif asked == "pip":
            print(*matrix.one(*names).pip_arguments(), sep="\n")
        else:
            print(*matrix.one(*names).beside, sep="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
