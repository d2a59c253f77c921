"""Print what an active environment lacks to run the tests and the demo: one requirement a line.

The requirements are those of pyproject.toml; arguments name other extras than `demo` and `dev`. It has to
work where nothing but pip is installed, so the parser that it needs is pip's own copy. It imports
none of the packages it asks about.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import tomllib
from pip._vendor.packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parent.parent


def requirements(project: dict, extras: list[str]) -> list[Requirement]:
    """The project's requirements and those of `extras`, an extra that names other extras resolved."""
    found = []
    lines = project["dependencies"] + [
        line for name in extras for line in project["optional-dependencies"][name]
    ]
    for requirement in map(Requirement, lines):
        if requirement.name == project["name"]:
            found += requirements(project | {"dependencies": []}, sorted(requirement.extras))
        else:
            found.append(requirement)
    return found


def is_there(requirement: Requirement) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def is_installed(project_name: str) -> bool:
    """Whether this checkout is what the environment has installed, with its command and entry points."""
    spec = find_spec("npu_replay")
    from_here = spec is not None and spec.origin == str(REPOSITORY / "npu_replay" / "__init__.py")
    return from_here and is_there(Requirement(project_name))


def main() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = requirements(project, sys.argv[1:] or ["demo", "dev"])
    for line in sorted({str(requirement) for requirement in needed if not is_there(requirement)}):
        print(line)
    if not is_installed(project["name"]):
        print(project["name"])


if __name__ == "__main__":
    main()
