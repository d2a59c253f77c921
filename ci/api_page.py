"""The signatures in docs/api.md and docs/zh/api.md, from the code.

python ci/api_page.py            # print them
python ci/api_page.py --write    # and put them into both pages
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pages
import site_pages

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / "docs" / name for name in ("api.md", "zh/api.md"))
MARKS = "<!-- signatures -->", "<!-- end of signatures -->"
MADE_BY_BLOCKS = {"Recording", "Replay", "Pinning", "Observation", "Following"}
"""Nobody calls their constructors."""


def signatures() -> str:
    """Those of all names in the page's tables, in their order, without types, which `help` has.

    The tables describe the names; a method's line is followed by what its docstring says first.
    """
    page = PAGES[0].read_text(encoding="utf-8")
    return "\n".join(line for name in re.findall(r"(?m)^\| `([\w.]*\w)` \|", page) for line in lines(name))


def lines(name: str) -> list[str]:
    attribute = pkgutil.resolve_name(f"npu_replay.{name}")
    if inspect.ismodule(attribute) or (inspect.isclass(attribute) and issubclass(attribute, Exception)):
        return []
    own = [] if name in MADE_BY_BLOCKS else [called(name, attribute)]
    members = site_pages.MEMBERS[name].split(", ") if name in site_pages.MEMBERS else []
    for member in members:
        method = getattr(attribute, member)
        first, *_ = inspect.getdoc(method).splitlines()
        own += [called(f"{name}.{member}", method), f"    {first}"]
    return own


def called(name: str, attribute: Any) -> str:
    """How it is called; a property is its name alone."""
    if not callable(attribute):
        return name
    signature = inspect.signature(attribute)
    plain = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return name + str(signature.replace(parameters=plain, return_annotation=signature.empty))


def block() -> str:
    return f"```text\n{signatures()}\n```"


if __name__ == "__main__":
    print(signatures())
    if "--write" in sys.argv:
        for file in PAGES:
            pages.rewrite(file, MARKS, block())
