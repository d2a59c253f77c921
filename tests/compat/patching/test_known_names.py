"""compat.patching.known_names: a module that lacks what a shim wraps is refused by that name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from npu_replay.compat.patching import known_names
from npu_replay.errors import ReplayError


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
