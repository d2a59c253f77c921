"""compat.patching: what is changed in somebody else's module comes back as it was, and is reported."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from npu_replay.compat.patching import patches as patching
from npu_replay.compat.patching.patches import Patches


class Product:
    value = 1


class Owner(Product):
    """Inherits `value`."""


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """The only group: a test before may have imported Megatron, and its shims are on."""
    monkeypatch.setattr(patching, "_groups", [])
    group = Patches("a test runs")
    yield group
    group.undo()
    assert patching.applied() == []


def test_a_wrapped_function_keeps_its_face_and_what_is_awaited_stays_so(patches: Patches) -> None:
    """Ray tells the methods that run in an event loop by asking, and verl keeps what it knows in a method."""

    def ask(number: int) -> int:
        return number

    async def wait(number: int) -> int:
        return number

    ask.told = "by verl"  # type: ignore[attr-defined]
    owner = SimpleNamespace(ask=ask, wait=wait)
    for name in ("ask", "wait"):
        patches.wrap(owner, name, lambda original, number: original(2 * number), "twice as much")
    assert owner.ask(2) == asyncio.run(owner.wait(2)) == 4
    assert owner.ask.told == "by verl"
    kept = owner.ask, owner.wait
    patching.turn(False)
    assert kept[0](2) == asyncio.run(kept[1](2)) == 2, "who holds it has the product's own while all is off"
    patching.turn(True)
    assert kept[0](2) == asyncio.run(kept[1](2)) == 4
    assert inspect.signature(owner.ask) == inspect.signature(ask)
    assert [inspect.iscoroutinefunction(function) for function in (owner.ask, owner.wait)] == [False, True]
    patches.undo()
    assert (owner.ask, owner.wait) == (ask, wait)


def test_two_groups_on_one_name_leave_nothing_if_the_newer_goes_first(patches: Patches) -> None:
    later = Patches("another")
    patches.set(Owner, "value", 2, "first")
    later.set(Owner, "value", 3, "second")
    patching.undo_all()
    assert "value" not in vars(Owner), "it inherits again"


class Worker:
    def ask(self, number: int) -> int:
        return number

    async def wait(self, number: int) -> int:
        return number


def copied(function: Any) -> Any:
    """As Ray's `_inject_tracing_into_class` copies the methods that an actor's class inherits."""
    if inspect.iscoroutinefunction(function):

        async def _resume_span(self: Any, *args: Any, _ray_trace_ctx: Any = None, **named: Any) -> Any:
            return await function(self, *args, **named)
    else:

        def _resume_span(self: Any, *args: Any, _ray_trace_ctx: Any = None, **named: Any) -> Any:
            return function(self, *args, **named)

    return functools.wraps(function)(_resume_span)


def actor() -> type[Worker]:
    return type("Actor", (Worker,), {name: copied(getattr(Worker, name)) for name in ("ask", "wait")})


def more(original: Any, self: Any, number: int) -> Any:
    return original(self, number + 1)


def test_the_copies_that_ray_gives_an_actors_class_are_wrapped_too(patches: Patches) -> None:
    class Own(Worker):
        @functools.wraps(Worker.ask)
        def ask(self, number: int) -> int:
            return super().ask(number) + 100

    made = actor()
    before = vars(made)["ask"]
    for name in ("ask", "wait"):
        patches.wrap(Worker, name, more, "one more")
    assert [kind().ask(1) for kind in (Worker, made, Own)] == [2, 2, 102]
    assert asyncio.run(made().wait(3)) == 4
    assert inspect.iscoroutinefunction(made.wait)
    patches.undo()
    assert vars(made)["ask"] is before
    assert [kind().ask(1) for kind in (Worker, made, Own)] == [1, 1, 101]


def test_a_copy_of_our_wrapper_is_wrapped_once(patches: Patches) -> None:
    """Its class was made while npu_replay was on, which has been off and on again since."""
    patches.wrap(Worker, "ask", more, "one more")
    made = actor()
    patches.undo()
    patches.wrap(Worker, "ask", more, "one more")
    assert [kind().ask(1) for kind in (Worker, made)] == [2, 2]


def test_a_wrapper_that_is_pickled_with_its_class_asks_the_switch_of_its_process() -> None:
    wrapper = patching.switched(abs, float)
    asked = {name for name in wrapper.__code__.co_names if name in vars(patching)}
    assert asked == {"is_on"}, (
        "by its name: pickled with the wrapper, a value would be that of another process"
    )
    assert pickle.loads(pickle.dumps(patching.is_on)) is patching.is_on
