"""One way to change somebody else's module: reversible, idempotent and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

_ABSENT = object()


@dataclass(frozen=True, eq=False)
class Patch:
    """One attribute that was replaced: where, why, and what was there."""

    owner: Any
    name: str
    why: str
    original: Any
    replacement: Any

    @property
    def where(self) -> str:
        """«torch.cuda.Stream»."""
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        kind = self.owner if isinstance(self.owner, type) else type(self.owner)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"{name}.{self.name}" if kind is self.owner else f"{self.name} of one {name}"

    def undo(self) -> bool:
        """Put back what was there; leave it alone if somebody has replaced it since. Was it put back?"""
        if vars(self.owner).get(self.name, _ABSENT) is not self.replacement:
            return False
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True


class Patches:
    """A group of patches that are made and undone together.

    Args:
        reason: the capability that is missing without them, for the report.
        beneath: undoes a patch that somebody else's lies over, and says whether it could.
    """

    def __init__(self, reason: str, beneath: Callable[[Patch], bool] | None = None) -> None:
        self.reason = reason
        self._beneath = beneath
        self._applied: list[Patch] = []

    def set(self, owner: Any, name: str, value: Any, why: str) -> None:
        """Replace an attribute of a module, class or object, remembering what was in its own dictionary."""
        if any(patch.owner is owner and patch.name == name for patch in self._applied):
            return
        original, seen = vars(owner).get(name, _ABSENT), getattr(owner, name, _ABSENT)
        setattr(owner, name, value)
        if vars(owner).get(name, _ABSENT) is not value:
            # A module's parameter, a property: it went elsewhere, and undo() would never find it there.
            if seen is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, seen)
            raise TypeError(
                f"{name} of {type(owner).__qualname__} is no plain attribute and can't be patched"
            )
        self.add(Patch(owner, name, why, original, value))

    def add(self, patch: Patch) -> None:
        """Remember a patch that was made already, beneath somebody else's."""
        self._applied.append(patch)
        if self not in _groups:
            _groups.append(self)

    def undo(self) -> list[Patch]:
        """Undo all, newest first; return those that somebody else has replaced since."""
        left = [patch for patch in reversed(self._applied) if not (patch.undo() or self._undo_beneath(patch))]
        self._applied.clear()
        if self in _groups:
            _groups.remove(self)
        return left

    def _undo_beneath(self, patch: Patch) -> bool:
        return _hand_down(patch) or (self._beneath is not None and self._beneath(patch))

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._applied)


_groups: list[Patches] = []


def _hand_down(patch: Patch) -> bool:
    """Where a later group patched the same name: let it put back, in its time, what `patch` found."""
    for group in _groups:
        for place, later in enumerate(group._applied):
            same = later.owner is patch.owner and later.name == patch.name
            if later is not patch and same and later.original is patch.replacement:
                group._applied[place] = replace(later, original=patch.original)
                return True
    return False


def applied() -> list[tuple[str, Patch]]:
    """Every patch that is in place, with its group's reason."""
    return [(group.reason, patch) for group in _groups for patch in group]


_undoings: list[Callable[[], None]] = []


def when_undone(action: Callable[[], None]) -> None:
    """Call `action` after everything is undone: for what a shim has to undo besides its patches."""
    if action not in _undoings:
        _undoings.append(action)


def undo_all() -> list[Patch]:
    """Undo every group, newest first; return the patches that somebody else has replaced since."""
    left = [patch for group in reversed(list(_groups)) for patch in group.undo()]
    for action in _undoings:
        action()
    return left
