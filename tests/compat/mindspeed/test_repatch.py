"""Our wrapper around one constructor, and those of MindSpeed and MegatronAdaptor: which lies where.

MegatronAdaptor's patch manager is the stand-in's; MindSpeed's is the real one, too, where that is. A process
without npu_replay is the measure: beside ours, and after it was undone, the products' own wrappers have to be
those of that process.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from choice import WHOLE
from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching import patches as patching
from npu_replay.compat.patching.patches import Patches
from on_mindspeed import processes

PRODUCTS = ("mindspeed", "megatron_adaptor")
PLACE = f"{__name__}.Router.__init__"


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


@pytest.fixture(autouse=True)
def turned_on() -> Iterator[None]:
    yield
    patching.turn(True)


@pytest.fixture(params=[False, True, pytest.param(processes.REAL, marks=pytest.mark.mindspeed)])
def managers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Both products' managers: of a MindSpeed that puts methods back or doesn't, or a real one's."""
    monkeypatch.syspath_prepend(processes.MEGATRON_ADAPTOR)
    if request.param != processes.REAL:
        monkeypatch.syspath_prepend(processes.STAND_IN_FOLDER)
    elif not processes.real_mindspeed() or processes.beside_real():
        pytest.skip(
            "no real MindSpeed with a registry of its own: put one of before core_r0.17.0 on PYTHONPATH"
        )
    native = Router.__init__
    patching = importlib.import_module("ascend_contract.patching")
    # The packages without their __init__, which patches torch and Megatron.
    for name in PRODUCTS:
        spec = importlib.machinery.PathFinder.find_spec(name)
        assert spec is not None
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    mindspeed = importlib.import_module("mindspeed.patch_utils")
    own = importlib.import_module("megatron_adaptor.patches.patch_manager")
    if request.param != processes.REAL:
        monkeypatch.setattr(mindspeed.Patch, "restores_methods", request.param)
    for module in {mindspeed, patching}:  # thousands of repatches; each would look through all modules
        monkeypatch.setattr(
            module, "sys", SimpleNamespace(modules={__name__: sys.modules[__name__]}), raising=False
        )
    yield {"MindSpeed": mindspeed.MindSpeedPatchesManager, "MegatronAdaptor": own.PatchesManager}
    Router.__init__ = native  # type: ignore[method-assign]
    for name in [name for name in sys.modules if name.partition(".")[0] in (*PRODUCTS, "ascend_contract")]:
        del sys.modules[name]


class Job:
    """What happens to Router in one process, event by event."""

    def __init__(self, managers: dict[str, Any], native: Any) -> None:
        Router.__init__ = native  # type: ignore[method-assign]
        for manager in managers.values():
            manager.patches_info.clear()
        self.managers = managers
        self.patches = Patches("a test")
        patching.turn(True)

    def does(self, event: str) -> None:
        if event == "somebody: wraps":
            Router.__init__ = adding("somebody's")(Router.__init__)  # type: ignore[method-assign]
        elif event == "npu_replay comes":
            repatch.wrap_init(self.patches, Router, adding("ours"), "why")
        elif event == "npu_replay goes":
            patching.turn(False)
            self.patches.undo()
        else:
            who, _, what = event.partition(": ")
            if what in ("removes by hand", "repatches"):
                self.managers[who].remove_patches()
            if what != "removes by hand":
                self.managers[who].register_patch(PLACE, adding_wrapper(who))
                self.managers[who].apply_patches()


@functools.cache
def adding_wrapper(who: str) -> Callable[..., Any]:
    """A product tells a wrapper from a replacement by its name."""
    return adding(f"{who}'s")


MIND = "MindSpeed"
ADAPTOR = "MegatronAdaptor"
AFTERWARDS = [
    *(
        f"{who}: {what}"
        for who in (MIND, ADAPTOR)
        for what in ("repatches", "removes by hand", "applies by hand")
    ),
    "somebody: wraps",
]


def orders() -> Iterator[list[str]]:
    """npu_replay and one product or both, in any order, with an early repatch or wrapper in any place."""
    for products in ([MIND], [ADAPTOR], [MIND, ADAPTOR]):
        come = [f"{who}: comes" for who in products]
        for order in itertools.permutations([*come, "npu_replay comes"]):
            early = [f"{who}: repatches" for who in products] + ["somebody: wraps", ""]
            for event, place in itertools.product(early, range(len(order) + 1)):
                yield [*order[:place], *([event] if event else []), *order[place:]]


def possible(events: list[str]) -> bool:
    """A product that isn't there does nothing."""
    first = {who: next((event for event in events if event.startswith(who)), "") for who in (MIND, ADAPTOR)}
    return all(event in ("", f"{who}: comes") for who, event in first.items())


def test_whatever_comes_first_and_is_repatched_ours_holds_once_and_nobody_elses_changes(
    managers: dict[str, Any],
) -> None:
    native = Router.__init__
    pairs = [*itertools.product(AFTERWARDS, repeat=2)]
    step = 1 if WHOLE else 3
    tried = 0
    for number, order in enumerate(dict.fromkeys(map(tuple, orders()))):
        for after in pairs[number % step :: step]:
            events = [*order, *after]
            if not possible(events):
                continue
            events.insert(len(events) - tried % 2, "npu_replay goes")
            events += [f"{who}: repatches" for who in (ADAPTOR, MIND) if f"{who}: comes" in order]
            tried += 1
            expected = walk(Job(managers, native), [event for event in events if "npu_replay" not in event])
            check(events, walk(Job(managers, native), events), expected)
    assert tried > 700


def listed() -> int:
    """How often the report lists our wrapper of Router's constructor."""
    return [patch.where for _, patch in patching.applied()].count(PLACE)


def walk(job: Job, events: list[str]) -> list[tuple[str, list[str], bool]]:
    """After each event: the wrappers that a new Router meets, and whether the report lists ours."""
    states = []
    for event in events:
        job.does(event)
        states.append((event, Router().calls, listed() == 1))
    return states


def check(events: list[str], got: list[Any], expected: list[Any]) -> None:
    here = False
    others = iter(expected)
    theirs = ["its own"]
    for event, calls, is_listed in got:
        if "npu_replay" in event:
            here = event == "npu_replay comes"
        else:
            theirs = next(others)[1]
        assert [call for call in calls if call != "ours"] == theirs, (events, event, calls, theirs)
        assert calls.count("ours") == int(here), (events, event, calls)
        assert is_listed is here, (events, event, "listed" if is_listed else "not listed")
