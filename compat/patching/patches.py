"""Changes somebody else's module in one way: reversible, idempotent and reported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeAlias

_ABSENT = object()


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
        """Return whether it holds; where others may take it away, a subclass looks."""
        return True

    def undo(self) -> bool:
        """Put the original back, unless it was replaced since; return whether it was put back."""
        if vars(self.owner).get(self.name, _ABSENT) is not self.replacement:
            return False
        _put(self.owner, self.name, self.original)
        return True


@dataclass(frozen=True, eq=False)
class Change:
    """Describes another change, for the report; `undo` undoes it and returns whether all was put back."""

    where: str
    why: str
    undo: Callable[[], bool]

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
        original, seen = vars(owner).get(name, _ABSENT), getattr(owner, name, _ABSENT)
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
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await around(original, *args, **kwargs)
        else:

            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return around(original, *args, **kwargs)

        self.set(owner, name, wrapper, why)

    def add(self, applied: Applied) -> None:
        """Record a change that was made by other means than `set`."""
        self._applied.append(applied)
        if self not in _groups:
            _groups.append(self)

    def has(self, owner: Any, name: str) -> bool:
        patches = (one for one in self._applied if isinstance(one, Patch))
        return any(patch.owner is owner and patch.name == name for patch in patches)

    def undo(self) -> list[Applied]:
        """Undo all, newest first; return those that were replaced by others since."""
        left = [one for one in reversed(self._applied) if not (one.undo() or self._undo_beneath(one))]
        self._applied.clear()
        if self in _groups:
            _groups.remove(self)
        return left

    def _undo_beneath(self, one: Applied) -> bool:
        """Undo a patch that isn't on top: another group of ours has patched it again."""
        if not isinstance(one, Patch):
            return False
        for group in _groups:
            for place, patch in enumerate(group._applied):
                if not isinstance(patch, Patch) or patch is one:
                    continue
                same = patch.owner is one.owner and patch.name == one.name
                if same and patch.original is one.replacement:
                    group._applied[place] = replace(patch, original=one.original)
                    return True
        return False

    def __iter__(self) -> Iterator[Applied]:
        return iter(self._applied)


_groups: list[Patches] = []


def applied() -> list[tuple[str, Applied]]:
    """Return all changes in place, with the reason of their group."""
    return [(group.reason, one) for group in _groups for one in group if one.in_place()]


_undoings: list[Callable[[], object]] = []


def when_undone(action: Callable[[], object]) -> None:
    _undoings.append(action)


def undo_all() -> list[Applied]:
    """Undo every group, newest first; return what was replaced by others since."""
    left = [one for group in reversed(list(_groups)) for one in group.undo()]
    for action in _undoings:
        action()
    return left
