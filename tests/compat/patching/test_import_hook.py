"""compat.import_hook: what waits for a module runs before or after its code, whoever came first; and names
that a product lacks can be imported, and give way to its own."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from npu_replay.compat.patching import import_hook, patches
from npu_replay.errors import ReplayError

NAME = "waited_for"
SERVED = "waited_for.deep.new"
CODE = """
from npu_replay.compat.patching.import_hook import order
order.append("code")
value = 1
"""
"""The package's own; a test's shims say in `order` when they ran, too."""


@pytest.fixture(autouse=True)
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the path that nobody has imported, and a hook that waits for and serves nothing else."""
    monkeypatch.setattr(import_hook, "_waiting", {})
    monkeypatch.setattr(import_hook, "_failures", {})
    monkeypatch.setattr(patches, "_groups", [])
    monkeypatch.setattr(
        sys, "meta_path", [finder for finder in sys.meta_path if finder is not import_hook._finder]
    )
    monkeypatch.setattr(import_hook, "order", [], raising=False)
    package = tmp_path / NAME
    (package / "deep").mkdir(parents=True)
    (package / "deep" / "__init__.py").touch()
    (package / "__init__.py").write_text(CODE)
    (package / "inner.py").write_text("from waited_for import value\nseen = value\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


def double(module: ModuleType) -> None:
    module.value *= 2  # type: ignore[attr-defined]


def broken(module: ModuleType) -> None:
    raise AttributeError("no such class")


def test_a_shim_runs_once_on_what_is_imported_before_anybody_sees_it() -> None:
    for _ in range(2):
        import_hook.when_imported(NAME, "doubles", double)
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)  # type: ignore[union-attr]
    assert copy.value == 1, "a private copy is nobody's"
    assert importlib.import_module(f"{NAME}.inner").seen == 2
    module = sys.modules[NAME]
    pickle.dumps(module.__spec__)
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader  # type: ignore[union-attr]
    assert importlib.reload(module).value == 1
    import_hook.when_imported(NAME, "doubles what is there already", double)
    assert module.value == 2


class Theirs(SourceFileLoader):
    """A loader that somebody hooked on the instance, and that can't be copied, as a proxy can't."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self.exec_module = self._hooked  # type: ignore[method-assign]

    def _hooked(self, module: ModuleType) -> None:
        import_hook.order.append("their hook")  # type: ignore[attr-defined]
        super().exec_module(module)

    def __copy__(self) -> Theirs:
        raise NotImplementedError


def test_a_loader_of_somebody_elses_runs_as_it_is(product: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(
        NAME, product / "__init__.py", loader=Theirs(NAME, str(product / "__init__.py"))
    )

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> Any:
            return spec if name == NAME else None

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    import_hook.when_imported(NAME, "doubles", double)
    assert importlib.import_module(NAME).value == 2
    assert import_hook.order == ["their hook", "code"]  # type: ignore[attr-defined]
    assert type(sys.modules[NAME].__loader__) is Theirs


def test_asked_for_by_the_module_itself_it_waits_for_its_end(product: Path) -> None:
    (product / "__init__.py").write_text(
        "from npu_replay.compat.patching import import_hook\n"
        "import_hook.when_imported('waited_for', 'doubles', lambda module: module.value)\n"
        "value = 1\n"
    )
    assert importlib.import_module(NAME).value == 1
    assert not import_hook._failures, "it ran too early, without a value"
    # Nobody was told: the finder had answered before. It is not lost, but done with the next call.
    import_hook.when_imported(NAME, "doubles", double)
    assert sys.modules[NAME].value == 2


@pytest.mark.parametrize("early", [False, True])
def test_a_shim_that_fails_is_one_error_and_the_import_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    import_hook.when_imported(NAME, "its shim", broken, early=early)
    with caplog.at_level(logging.ERROR):
        assert importlib.import_module(NAME).value == 1
    assert [record.getMessage() for record in caplog.records] == [
        "[npu_replay] its shim failed on waited_for: AttributeError: no such class. " + import_hook.MEANING
    ]
    with pytest.raises(ReplayError, match=r"its shim failed: AttributeError: no such class.*STRICT=off"):
        import_hook.refuse_failures()
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    import_hook.refuse_failures()


def test_a_shim_that_fails_may_end_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import_hook.when_imported(NAME, "its shim", broken, ends=True)
    for _ in range(2):
        with pytest.raises(ReplayError, match="its shim failed: AttributeError: no such class"):
            importlib.import_module(NAME)
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    assert importlib.import_module(NAME).value == 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "forgotten", "never"])
def test_disabled_or_forgotten_a_shim_does_not_run(
    monkeypatch: pytest.MonkeyPatch, when: str, early: bool
) -> None:
    ran: list[object] = []
    monkeypatch.setenv("NPU_REPLAY_DISABLE", str(int(when == "before")))
    import_hook.when_imported(NAME, "looks", ran.append, early=early)
    monkeypatch.setenv("NPU_REPLAY_DISABLE", str(int(when == "after")))
    if when == "forgotten":
        import_hook.forget()
        assert import_hook._finder not in sys.meta_path
    assert importlib.util.find_spec(NAME) is not None
    assert not ran, "looking for a package runs nothing"
    importlib.import_module(NAME)
    assert bool(ran) == (when == "never")


# What is to be there before a module's code runs


@pytest.mark.parametrize("found_by_ours", [True, False])
def test_a_preparation_comes_before_the_code_unless_another_finder_found_it(
    monkeypatch: pytest.MonkeyPatch, found_by_ours: bool
) -> None:
    """Then all of it comes before the first block."""
    order: list[str] = import_hook.order  # type: ignore[attr-defined]
    for _ in range(2):
        import_hook.when_imported(NAME, "prepares", lambda _: order.append("prepared"), early=True)
    import_hook.when_imported(NAME, "changes", lambda _: order.append("changed"))
    if not found_by_ours:
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[1:], sys.meta_path[0]])
    importlib.import_module(NAME)
    assert order == (["prepared", "code", "changed"] if found_by_ours else ["code"])
    import_hook.refuse_failures()
    assert sorted(order) == ["changed", "code", "prepared"]


def test_what_a_preparation_waits_for_is_not_missed(product: Path) -> None:
    """The package's own code imports the module that is waited for, as verl's does."""
    (product / "__init__.py").write_text("from waited_for.inner import value\n")
    (product / "inner.py").write_text("value = 1\n")

    def waits(_: object) -> None:
        import_hook.when_imported(f"{NAME}.inner", "doubles", double)

    import_hook.when_imported(NAME, "waits", waits, early=True)
    assert importlib.import_module(NAME).value == 2


# A module that is served; served, reported and withdrawn on each Megatron-core: tests/matrix


def fill(module: Any) -> None:
    module.value = "made"


def serve_it() -> None:
    import_hook.serve(SERVED, fill, "its why", "its reason")


def test_a_package_that_somebody_made_by_hand_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("absent")
    stand_in.__path__ = []
    monkeypatch.setitem(sys.modules, "absent", stand_in)
    import_hook.serve("absent.new", fill, "its why", "its reason")
    with pytest.raises(ModuleNotFoundError, match=r"absent\.new"):
        importlib.import_module("absent.new")


def test_a_finder_that_asks_all_finders_is_no_endless_loop() -> None:
    class Asking:
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            return next((spec for spec in specs if spec is not None), None)

    serve_it()
    sys.meta_path.append(Asking())  # type: ignore[arg-type]
    assert importlib.import_module(SERVED).value == "made"


def test_what_somebody_else_has_put_in_its_place_stays() -> None:
    """Withdrawn it is missing as before: tests/matrix/test_report.py."""
    package = importlib.import_module("waited_for.deep")
    serve_it()
    importlib.import_module(SERVED)
    theirs = ModuleType(SERVED)
    sys.modules[SERVED] = package.new = theirs  # type: ignore[attr-defined]
    import_hook.forget()
    patches.undo_all()
    assert sys.modules[SERVED] is package.new is theirs
