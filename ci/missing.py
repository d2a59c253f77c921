"""Print what an active environment lacks to run the tests and the demo, and how to get it.

Nothing is printed where it has all.

The requirements are those of pyproject.toml; arguments name other extras than `demo` and `dev`. It has to
work where nothing but pip is installed, so the parser that it needs is pip's own copy. It imports
none of the packages it asks about.
"""

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import tomllib
from pip._vendor.packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parent.parent


def requirements(project: dict, extras: list[str]) -> list[Requirement]:
    """The project's requirements and those of `extras`."""
    of_extras = [line for name in extras for line in project["optional-dependencies"][name]]
    return [Requirement(line) for line in project["dependencies"] + of_extras]


def is_there(requirement: Requirement) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def main() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = requirements(project, sys.argv[1:] or ["demo", "dev"])
    missing = {str(requirement): requirement.name for requirement in needed if not is_there(requirement)}
    # The environment has to have this checkout itself, with its command and entry points.
    spec = find_spec("npu_replay")
    from_here = spec is not None and spec.origin == str(REPOSITORY / "npu_replay" / "__init__.py")
    if not from_here or not is_there(Requirement(project["name"])):
        missing[project["name"]] = project["name"]
    if not missing:
        return
    place = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    print(f"The active environment ({place}) lacks, and is left as it is:")
    print(*(f"    {line}" for line in sorted(missing)), sep="\n")
    # torch belongs to the device, so whoever owns the environment picks its build.
    if "torch" in missing.values():
        pins = (REPOSITORY / "ci" / "constraints.txt").read_text(encoding="utf-8")
        pin = re.search(r"(?m)^torch==.*", pins)[0]
        print(f"torch: the build for your device, or the tested one: pip install {pin}")
    # Without the constraints: they would move what is there already, numpy for one.
    if others := [f"'{line}'" for line in sorted(missing) if missing[line] not in ("torch", project["name"])]:
        print("the rest: pip install", *others)
    if project["name"] in missing:
        print(f"npu-replay from here: pip install --no-deps -e {REPOSITORY}")


if __name__ == "__main__":
    main()
