"""Ours and MindSpeed's wrapper around one constructor: which lies beneath, and what undoing leaves."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching.patches import Patches

STAND_IN = Path(__file__).parents[2] / "on_mindspeed" / "stand_in"


class Router:
    def __init__(self) -> None:
        self.calls = ["its own"]


def adding(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrapper(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(self: Router) -> None:
            init(self)
            self.calls.append(name)

        return made

    return wrapper


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MindSpeed's table of patches, with one of Router's constructor."""
    monkeypatch.syspath_prepend(STAND_IN)
    native = Router.__init__
    manager = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    manager.register_patch(f"{__name__}.Router.__init__", adding("MindSpeed's"))
    manager.apply_patches()
    yield manager
    Router.__init__ = native  # type: ignore[method-assign]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspeed"]:
        del sys.modules[name]


def apply_again(manager: Any) -> None:
    """What repatch() does: every wrapper comes off and is put on again."""
    manager.remove_patches()
    manager.register_patch(f"{__name__}.Router.__init__", adding("MindSpeed's"))
    manager.apply_patches()


def test_ours_lies_beneath_at_once_stays_there_and_is_gone_after_undo(manager: Any) -> None:
    patches = Patches("a test", beneath=repatch.undo)
    repatch.wrap_init(patches, Router, adding("ours"), "why")
    assert Router().calls == ["its own", "ours", "MindSpeed's"]
    apply_again(manager)
    assert Router().calls == ["its own", "ours", "MindSpeed's"]
    assert patches.undo() == []
    assert Router().calls == ["its own", "MindSpeed's"]
    apply_again(manager)
    assert Router().calls == ["its own", "MindSpeed's"]


def test_over_somebody_elses_wrapper_ours_lies_on_top_until_a_repatch(manager: Any) -> None:
    Router.__init__ = adding("somebody's")(Router.__init__)  # type: ignore[method-assign]
    repatch.wrap_init(Patches("a test", beneath=repatch.undo), Router, adding("ours"), "why")
    assert Router().calls == ["its own", "MindSpeed's", "somebody's", "ours"]
    apply_again(manager)
    assert Router().calls == ["its own", "ours", "MindSpeed's"]
