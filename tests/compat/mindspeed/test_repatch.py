"""Our wrapper around a constructor, and those of MindSpeed and MegatronAdaptor: which lies beneath."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching.patches import Patches

TESTS = Path(__file__).parents[2]
STAND_IN = TESTS / "on_mindspeed" / "stand_in"
ADAPTOR = TESTS / "stubs" / "megatron_adaptor_stand_in"


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


NAME = f"{__name__}.Router.__init__"


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The registries of patches of both products, by product, empty."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.syspath_prepend(ADAPTOR)
    native = Router.__init__
    for package in ("megatron_adaptor", "megatron_adaptor.patches"):  # whose import would patch Megatron
        module = types.ModuleType(package)
        module.__path__ = [str(ADAPTOR / package.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, package, module)
    yield {
        "MegatronAdaptor": importlib.import_module("megatron_adaptor.patches.patch_manager").PatchesManager,
        "MindSpeed": importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager,
    }
    Router.__init__ = native  # type: ignore[method-assign]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mindspeed", "megatron_adaptor")]:
        del sys.modules[name]


@pytest.fixture
def manager(products: dict[str, Any]) -> Any:
    """MindSpeed's registry, with a patch of Router's constructor."""
    apply_again(products["MindSpeed"])
    return products["MindSpeed"]


def apply_again(manager: Any, name: str = "MindSpeed's") -> None:
    """Take every wrapper off and put it on again, as repatch() does."""
    manager.remove_patches()
    manager.register_patch(NAME, adding(name))
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


def wrap() -> Patches:
    patches = Patches("a test", beneath=repatch.undo)
    repatch.wrap_init(patches, Router, adding("ours"), "why")
    return patches


@pytest.mark.parametrize(
    "when", ["before both", "between", "after both", "after both and a repatch of the lower"]
)
@pytest.mark.parametrize(
    "repatches", itertools.product(["MegatronAdaptor", "MindSpeed"], repeat=3), ids="-".join
)
def test_ours_lies_beneath_both_products_whichever_patches_anew(
    products: dict[str, Any], when: str, repatches: tuple[str, ...]
) -> None:
    patches = None
    if when == "before both":
        patches = wrap()
    apply_again(products["MegatronAdaptor"], "MegatronAdaptor")
    if when == "between":
        patches = wrap()
    apply_again(products["MindSpeed"], "MindSpeed")
    if "repatch" in when:
        apply_again(products["MegatronAdaptor"], "MegatronAdaptor")
    patches = patches or wrap()
    expected = {
        # The repatch() of the lower product throws the upper one's wrapper away.
        "MegatronAdaptor": ["its own", "ours", "MegatronAdaptor"],
        "MindSpeed": ["its own", "ours", "MegatronAdaptor", "MindSpeed"],
    }
    assert Router().calls == expected["MegatronAdaptor" if "repatch" in when else "MindSpeed"]
    for product in repatches:
        apply_again(products[product], product)
        assert Router().calls == expected[product]
    assert patches.undo() == []
    assert "ours" not in Router().calls
    for product in repatches:
        apply_again(products[product], product)
        assert Router().calls == [call for call in expected[product] if call != "ours"]


def test_over_both_products_and_somebody_elses_wrapper_ours_lies_on_top_until_a_repatch(
    products: dict[str, Any],
) -> None:
    for name, manager in products.items():
        apply_again(manager, name)
    Router.__init__ = adding("somebody's")(Router.__init__)  # type: ignore[method-assign]
    patches = wrap()
    assert Router().calls == ["its own", "MegatronAdaptor", "MindSpeed", "somebody's", "ours"]
    apply_again(products["MindSpeed"], "MindSpeed")
    assert Router().calls == ["its own", "ours", "MegatronAdaptor", "MindSpeed"]
    apply_again(products["MegatronAdaptor"], "MegatronAdaptor")
    assert Router().calls == ["its own", "ours", "MegatronAdaptor"]
    patches.undo()
    assert "ours" not in Router().calls
