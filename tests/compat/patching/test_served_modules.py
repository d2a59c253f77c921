"""compat.import_hook.serve: a name that a product lacks can be imported, and gives way to its own."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import npu_replay
from npu_replay.compat.patching import import_hook, patches
from npu_replay.compat.patching.import_hook import serve

NAME = "product.inner.new"


@pytest.fixture(autouse=True)
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the path that has no module `new`, and nothing else that is served or patched."""
    monkeypatch.setattr(import_hook, "_served", {})
    monkeypatch.setattr(import_hook, "_waiting", {})
    monkeypatch.setattr(patches, "_groups", [])
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if one is not import_hook._finder])
    inner = tmp_path / "product" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield inner
    for name in [name for name in sys.modules if name.split(".")[0] == "product"]:
        del sys.modules[name]


def fill(module: Any) -> None:
    module.value = "made"


def serve_it() -> None:
    serve(NAME, fill, "a name that others import", reason="what others do with it")


def withdraw() -> None:
    import_hook.forget()
    assert not patches.undo_all()


def reported() -> list[str]:
    return [patch.where for patch in npu_replay.report().patches]


def test_a_name_that_is_missing_is_found_imported_and_reported() -> None:
    meant = False
    serve(NAME, fill, "a name that others import", reason="what others do with it", where=lambda: meant)
    assert importlib.util.find_spec(NAME) is None, "a release for which it is not meant"
    del sys.modules["product.inner"], sys.modules["product"]
    meant = True
    seen: list[str] = []
    import_hook.when_imported(NAME, "a test", lambda module: seen.append(module.value))
    assert "product" not in sys.modules, "nothing is imported for it"
    assert reported() == []
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert NAME not in sys.modules
    from product.inner import new  # type: ignore[import-not-found]

    assert new.value == "made"
    assert seen == ["made"], "a shim that waits for it runs after it was filled"
    pickle.dumps(new.__spec__)
    assert sys.modules[NAME] is new is importlib.import_module(NAME)
    (patch,) = npu_replay.report().patches
    assert (patch.where, patch.why, patch.reason) == (
        NAME,
        "a name that others import",
        "what others do with it",
    )
    with pytest.raises(ModuleNotFoundError, match=r"product\.inner\.newer"):
        importlib.import_module("product.inner.newer")
    with pytest.raises(ImportError, match="cannot import name 'newer'"):
        from product.inner import newer  # noqa: F401


def test_without_the_product_or_disabled_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    serve("absent.new", fill, "")
    with pytest.raises(ModuleNotFoundError, match="absent"):
        importlib.import_module("absent.new")
    stand_in = ModuleType("absent")
    stand_in.__path__ = []
    monkeypatch.setitem(sys.modules, "absent", stand_in)
    with pytest.raises(ModuleNotFoundError, match=r"absent\.new"):
        importlib.import_module("absent.new")
    serve_it()
    monkeypatch.setenv("NPU_REPLAY_DISABLE", "1")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    import_hook.forget()
    before = list(sys.meta_path)
    serve_it()
    assert sys.meta_path == before


def test_a_finder_that_asks_all_finders_is_no_endless_loop() -> None:
    class Asking:
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            found = (one.find_spec(name, path, target) for one in sys.meta_path if one is not self)
            return next((spec for spec in found if spec is not None), None)

    serve_it()
    sys.meta_path.append(Asking())  # type: ignore[arg-type]
    assert importlib.import_module(NAME).value == "made"
    sys.meta_path.insert(0, sys.meta_path.pop())
    del sys.modules[NAME]
    assert importlib.import_module(NAME).value == "made"


def test_withdrawn_it_is_missing_as_before() -> None:
    package = importlib.import_module("product.inner")
    serve_it()
    importlib.import_module(NAME)
    withdraw()
    assert reported() == []
    serve_it()
    assert importlib.import_module(NAME).value == "made", "and it can be served again"
    theirs = ModuleType(NAME)
    sys.modules[NAME] = package.new = theirs  # type: ignore[attr-defined]
    withdraw()
    assert sys.modules[NAME] is package.new is theirs, "what somebody else has put there stays"
