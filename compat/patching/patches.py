"""Changes other products' modules. Each change can be undone and is reported, and all ask one switch.

An object of a product may hold a wrapper for as long as it lives: a router its methods, a framework a bound
method. So each wrapper asks whether npu_replay is on, and is the product's own function otherwise. Only names
of modules and classes are put back by `undo`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_ABSENT = object()


_is_on = True


def is_on() -> bool:
    """Return whether npu_replay is on in this process. Whatever a product's objects may hold asks this."""
    return _is_on


def turn(on: bool) -> None:
    """Turn all wrappers of this process on or off."""
    global _is_on
    _is_on = on


def switched(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours, and `original` while npu_replay is off; either may be async.

    >>> from npu_replay.compat.patching import patches
    >>> shown = patches.switched(abs, lambda number: 2 * number)
    >>> shown(-1)
    -2
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        # Not the variable: Ray pickles a wrapper with the values of all that it refers to but functions.
        return (ours if is_on() else original)(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    made = functools.wraps(original)(call_async if inspect.iscoroutinefunction(original) else call)
    made.__npu_replay__ = True  # type: ignore[attr-defined]
    return made


@dataclass(frozen=True, eq=False)
class Change:
    """Describes one change, for the report.

    Attributes:
        where: the full name of what was changed, «torch.cuda.Stream».
        why: what the change is for.
        undo: undoes it, unless it was replaced by others since. Without it the change stays in place: its
            functions ask the switch.
        attribute: the owner and name of the attribute that was replaced, if it is one.
    """

    where: str
    why: str
    undo: Callable[[], object] = lambda: None
    attribute: tuple[Any, str] | None = None


def _where(owner: Any, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    kind = owner if isinstance(owner, type) else type(owner)
    of = f"{kind.__module__}.{kind.__qualname__}"
    return f"{of}.{name}" if kind is owner else f"{name} of one {of}"


def _holders_of_a_copy(owner: Any, name: str, function: Any) -> Iterator[type]:
    """Yield the subclasses of an owner, if it is a class, to which Ray gave a copy of this function.

    A copy that was made of a wrapper of ours has that inside, and is left.
    """
    subclasses: list[type] = owner.__subclasses__() if isinstance(owner, type) else []
    for kind in subclasses:
        own = vars(kind).get(name)
        is_rays = getattr(getattr(own, "__code__", None), "co_name", "") == "_resume_span"
        while is_rays and own is not function and not getattr(own, "__npu_replay__", own is None):
            own = getattr(own, "__wrapped__", None)
        if is_rays and own is function:
            yield kind
        yield from _holders_of_a_copy(kind, name, function)


class Patches:
    """Makes and undoes a group of patches together.

    >>> import types
    >>> from npu_replay.compat.patching.patches import Patches
    >>> owner, patches = types.SimpleNamespace(value=1), Patches("an example")
    >>> patches.set(owner, "value", 2, "two is better")
    >>> owner.value, patches.undo(), owner.value
    (2, None, 1)

    Args:
        reason: the capability that is missing without them, for the report.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._applied: list[Change] = []

    def set(self, owner: Any, name: str, value: Any, why: str) -> None:
        """Replace a plain attribute of a module, class or object, and keep what its own dictionary had."""
        if not self.has(owner, name):
            original = vars(owner).get(name, _ABSENT)
            setattr(owner, name, value)
            self.note(owner, name, why, original, value)

    def note(self, owner: Any, name: str, why: str, original: Any, ours: Any) -> None:
        """Record that an attribute was replaced by ours; it is put back unless it was replaced since."""

        def undo() -> None:
            if vars(owner).get(name, _ABSENT) is not ours:
                return
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        self.add(Change(_where(owner, name), why, undo, attribute=(owner, name)))

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], why: str) -> None:
        """Replace a function, plain or async, by `around(original, *arguments)` of the same signature.

        Ray gives the class of an actor a copy of each method that it inherits, made when the class is defined
        or unpickled. Such copies are replaced, too. That reaches calls by `self`; the methods that Ray itself
        calls are bound when it loads the class.
        """
        if self.has(owner, name):
            return
        function = getattr(owner, name)
        for holder in (owner, *_holders_of_a_copy(owner, name, function)):
            original = getattr(holder, name)
            self.set(holder, name, switched(original, functools.partial(around, original)), why)

    def add(self, change: Change) -> None:
        """Record a change that was made by other means than `set`."""
        self._applied.append(change)
        if self not in _groups:
            _groups.append(self)

    def has(self, owner: Any, name: str) -> bool:
        attributes = filter(None, (change.attribute for change in self._applied))
        return any(patched is owner and name == known for patched, known in attributes)

    def undo(self) -> None:
        """Undo all, newest first."""
        for change in reversed(self._applied):
            change.undo()
        self._applied.clear()
        if self in _groups:
            _groups.remove(self)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._applied)


_groups: list[Patches] = []


def applied() -> list[tuple[str, Change]]:
    """Return all changes in place, with the reason of their group."""
    return [(group.reason, change) for group in _groups for change in group]


def undo_all() -> None:
    """Undo every group, newest first."""
    for group in reversed(list(_groups)):
        group.undo()
