"""What shims rely on: names that are checked; and what the head of each says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from npu_replay import compat
from npu_replay.compat.patching import known_names
from npu_replay.errors import ReplayError

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


class Strategy:
    limit = 3

    def forward_step(self, batch: object, *, row: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("needed", "got"),
    [
        ({"Strategy.forward_step": ("batch", "row"), "Strategy.limit": (), "Strategy": ()}, ""),
        ({"Strategy.forward_step": ("batch", "column")}, r"got \(self, batch, row\)"),
        ({"Strategy.forward_step": ("row", "batch")}, r"expected Strategy.forward_step\(row, batch\)"),
        ({"Strategy.limit": ("batch",)}, "got 3"),
        ({"Strategy.train_step": ()}, "expected Strategy.train_step, got None"),
        ({"Actor.forward_step": ()}, "expected Actor.forward_step,"),
    ],
    ids=["all there", "an argument", "an order", "no function", "a method", "a class"],
)
def test_a_module_without_what_is_wrapped_is_refused(needed: dict[str, tuple[str, ...]], got: str) -> None:
    here = SimpleNamespace(__name__="here", Strategy=Strategy)
    if not got:
        known_names.check(here, needed, "somebody's strategy", "product")
        return
    says = f"(?is)here: this somebody's strategy is another than npu_replay knows.*{got}.*release of product"
    with pytest.raises(ReplayError, match=says):
        known_names.check(here, needed, "somebody's strategy", "product")
