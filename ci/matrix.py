"""The releases of ci/matrix.toml, and what pip has to be asked for to get one. The scripts ask it:

    python ci/matrix.py names [NAME ...]            # what these names mean, one release a line; no name: all
    python ci/matrix.py tier parallel               # the releases of a tier
    python ci/matrix.py pip megatron 0.18.0         # pip's arguments for a release
    python ci/matrix.py beside megatron 0.18.0      # what has to lie beside it

A name is a release (0.15.3), or product and release (megatron-0.15.3, megatron-core-0.15.3).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

TOML = Path(__file__).resolve().with_name("matrix.toml")
TIERS = "tiers"
KEYS = {"python", "beside"}


@dataclass(frozen=True)
class Release:
    """One release of one product."""

    package: str
    version: str
    python: str = ""
    """The oldest Python that it says it runs on, where that is newer than the tests'; "" elsewhere."""
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
        return bool(self.python) and _pair(python) < _pair(self.python)

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
        asked = {_plain(name): name for name in names}
        found = [release for release in self.releases if {release.name, release.version} & asked.keys()]
        known = {word for release in found for word in (release.name, release.version)}
        if unknown := [name for plain, name in asked.items() if plain not in known]:
            raise ValueError(
                f"ci/matrix.toml has no {', '.join(unknown)}. It has "
                f"{', '.join(release.name for release in self.releases)}"
            )
        return found if asked else list(self.releases)

    def one(self, product: str, version: str) -> Release:
        """The release of this product.

        Raises:
            ValueError: it isn't in the file.
        """
        return self.of([f"{product}-{version}"])[0]


def _plain(name: str) -> str:
    return name.replace("megatron-core-", "megatron-")


def _pair(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def read(path: Path = TOML) -> Matrix:
    """What the file says.

    Raises:
        ValueError: a key that isn't known, or a tier of a release that isn't there.
    """
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    tiers = found.pop(TIERS, {})
    releases = tuple(_release(package, *line) for package, lines in found.items() for line in lines.items())
    matrix = Matrix(releases, {})
    return Matrix(releases, {tier: tuple(matrix.of(names)) for tier, names in tiers.items()})


def _release(package: str, version: str, line: Mapping[str, Any]) -> Release:
    if unknown := line.keys() - KEYS:
        raise ValueError(f"{package} {version}: {', '.join(sorted(unknown))} isn't known; {sorted(KEYS)} are")
    return Release(package, version, line.get("python", ""), tuple(line.get("beside", ())))


def answer(asked: str, names: Sequence[str]) -> list[str]:
    """The lines that a script asked for."""
    matrix = read()
    if asked == "names":
        return [f"{release.product} {release.version}" for release in matrix.of(names)]
    if asked == "tier":
        return [release.version for release in matrix.tiers[names[0]]]
    release = matrix.one(*names)
    return release.pip_arguments() if asked == "pip" else list(release.beside)


def main(arguments: Sequence[str]) -> int:
    """Print the answer; return 2 where there is none."""
    try:
        print(*answer(arguments[0], arguments[1:]), sep="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
