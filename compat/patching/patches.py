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
from typing import Any, TypeAlias

_ABSENT = object()


class _Switch:
    on = True


_switch = _Switch()


def is_on() -> bool:
    """Return whether npu_replay is on in this process. Whatever a product's objects may hold asks this."""
    return _switch.on


def turn(on: bool) -> None:
    """Turn all wrappers of this process on or off."""
    _switch.on = on


def switched(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ours, and `original` while npu_replay is off; either may be async.

    >>> from npu_replay.compat.patching import patches
    >>> shown = patches.switched(abs, lambda number: 2 * number)
    >>> shown(-1)
    -2
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if _switch.on else original)(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return functools.wraps(original)(call_async if inspect.iscoroutinefunction(original) else call)


@dataclass(frozen=True, eq=False)
class Patch:
    """Describes one attribute that was replaced: where, why, and the original."""

    owner: Any
    name: str
    why: str
    original: Any
    replacement: Any

    @property
    def where(self) -> str:
        """Return the full name of the attribute, «torch.cuda.Stream»."""
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        kind = self.owner if isinstance(self.owner, type) else type(self.owner)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"{name}.{self.name}" if kind is self.owner else f"{self.name} of one {name}"

    def in_place(self) -> bool:
        """Return whether the patch is in place. A subclass looks, where others may remove the patch."""
        return True

    def undo(self) -> bool:
        """Put the original back, unless it was replaced since; return whether it was put back."""
        if vars(self.owner).get(self.name, _ABSENT) is not self.replacement:
            return False
        _put(self.owner, self.name, self.original)
        return True


@dataclass(frozen=True, eq=False)
class Change:
    """Describes another change, for the report; `undo` undoes it and returns whether all was put back.

    A change without `undo` stays in place: its functions ask the switch.
    """

    where: str
    why: str
    undo: Callable[[], bool] = lambda: True

    def in_place(self) -> bool:
        return True


Applied: TypeAlias = "Patch | Change"


def _put(owner: Any, name: str, value: object) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


class Patches:
    """Makes and undoes a group of patches together.

    >>> import types
    >>> from npu_replay.compat.patching.patches import Patches
    >>> owner, patches = types.SimpleNamespace(value=1), Patches("an example")
    >>> patches.set(owner, "value", 2, "two is better")
    >>> owner.value, patches.undo(), owner.value
    (2, [], 1)

    Args:
        reason: the capability that is missing without them, for the report.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._applied: list[Applied] = []

    def set(self, owner: Any, name: str, value: Any, why: str) -> None:
        """Replace an attribute of a module, class or object, and keep what was in its own dictionary.

        Raises:
            TypeError: it isn't kept there (a module's parameter, a property), and couldn't be undone.
        """
        if self.has(owner, name):
            return
        original = vars(owner).get(name, _ABSENT)
        seen = getattr(owner, name, _ABSENT)
        setattr(owner, name, value)
        if vars(owner).get(name, _ABSENT) is not value:
            _put(owner, name, seen)
            raise TypeError(
                f"{name} of {type(owner).__qualname__} is no plain attribute and can't be patched"
            )
        self.add(Patch(owner, name, why, original, value))

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], why: str) -> None:
        """Replace a function, plain or async, by `around(original, *arguments)` of the same signature."""
        original = getattr(owner, name)
        self.set(owner, name, switched(original, functools.partial(around, original)), why)

    def add(self, applied: Applied) -> None:
        """Record a change that was made by other means than `set`."""
        self._applied.append(applied)
        if self not in _groups:
            _groups.append(self)

    def has(self, owner: Any, name: str) -> bool:
        patches = (change for change in self._applied if isinstance(change, Patch))
        return any(patch.owner is owner and patch.name == name for patch in patches)

    def undo(self) -> list[Applied]:
        """Undo all, newest first; return those that were replaced by others since."""
        left = [change for change in reversed(self._applied) if not change.undo()]
        self._applied.clear()
        if self in _groups:
            _groups.remove(self)
        return left

    def __iter__(self) -> Iterator[Applied]:
        return iter(self._applied)


_groups: list[Patches] = []


def applied() -> list[tuple[str, Applied]]:
    """Return all changes in place, with the reason of their group."""
    return [(group.reason, change) for group in _groups for change in group if change.in_place()]


def undo_all() -> list[Applied]:
    """Undo every group, newest first; return what was replaced by others since."""
    return [change for group in reversed(list(_groups)) for change in group.undo()]
