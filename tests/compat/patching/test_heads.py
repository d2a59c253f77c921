"""The head of each module that changes a product says what it asks for, what it changes, how it is undone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from npu_replay import compat

COMPAT = Path(compat.__file__).parent
SHIMS = [
    str(path.relative_to(COMPAT))
    for path in sorted(COMPAT.rglob("*.py"))
    if path.parent.name != "patching"
    and re.search(r"\bPatches\(|\b(when_imported|serve)\(|^Changes:", path.read_text(encoding="utf-8"), re.M)
]


@pytest.mark.parametrize("shim", [*SHIMS, "patching/import_hook.py"])
def test_a_shims_head_says_what_it_asks_for_what_it_changes_and_how_it_is_undone(shim: str) -> None:
    head = ast.get_docstring(ast.parse((COMPAT / shim).read_text(encoding="utf-8"))) or ""
    places = [head.find(f"\n{word}:") for word in ("Asks", "Changes", "Undone")]
    assert -1 not in places
    assert places == sorted(places)
