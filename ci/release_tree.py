"""The tree that a release is built from: with the repository's address in its metadata and README.

    python ci/release_tree.py --version
    python ci/release_tree.py FOLDER https://...     changes the copy in FOLDER

A package page shows README.md without the files beside it: its links and pictures need the whole address, of
the version's tag.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#)([^)\s]+)\)")
_URLS = """
[project.urls]
Homepage = "{address}"
Documentation = "{address}/blob/v{version}/docs/index.md"
Troubleshooting = "{address}/blob/v{version}/docs/troubleshooting.md"
Changelog = "{address}/blob/v{version}/CHANGELOG.md"
Issues = "{address}/issues"
"""


def version(tree: Path = ROOT) -> str:
    """npu_replay.__version__, without importing it."""
    for line in ast.parse((tree / "npu_replay" / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__version__":
            return str(ast.literal_eval(line.value))
    raise SystemExit("npu_replay/__init__.py has no __version__")


def main(arguments: Sequence[str]) -> int:
    """Print the version, or change a tree."""
    if arguments == ["--version"]:
        print(version())
        return 0
    tree = Path(arguments[0])
    address = arguments[1].rstrip("/")
    if not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)+", address):
        print(f"expected the repository's address, https://..., got {address}", file=sys.stderr)
        return 1
    of = version(tree)

    def whole(match: re.Match[str]) -> str:
        """A link into the repository by its address; pictures go to the file itself."""
        picture, text, target = match.groups()
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/v{of}/{target})"

    readme = tree / "README.md"
    project = tree / "pyproject.toml"
    readme.write_text(_LINK.sub(whole, readme.read_text(encoding="utf-8")), encoding="utf-8")
    before, scripts, after = project.read_text(encoding="utf-8").partition("\n[project.scripts]\n")
    urls = _URLS.format(address=address, version=of)
    project.write_text(f"{before}{urls}{scripts}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
