"""Wraps a constructor so that MindSpeed's own wrapper, and its repatch(), leave ours in place.

MindSpeed keeps what it has patched, and `repatch()` throws away what lies over its own wrapper. So ours lies
beneath, whichever of the two came first.

Asks:     MindSpeed's list of patches.
Changes:  what MindSpeed keeps for the original of the constructor.
Undone:   by `undo`, which a group calls for patches of its own that others lie over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_replay.compat.mindspeed import features
from npu_replay.compat.patching.patches import Patch, Patches

Init = Callable[..., None]


def wrap_init(patches: Patches, cls: type, wrapped: Callable[[Init], Any], why: str) -> None:
    """Replace `cls.__init__` by `wrapped(init)`, beneath MindSpeed's wrapper.

    `patches` has to be made with `beneath=undo`, and `wrapped` to use functools.wraps.
    """
    under = patch_of(cls)
    ours = None if under is None else wrapped(under.orig_func)
    if ours is None or not _put_below(under, ours):
        # On top: MindSpeed isn't here, or a wrapper lies over its own until a repatch() drops all.
        patches.set(cls, "__init__", wrapped(cls.__init__), why)  # type: ignore[misc]
    if ours is not None:
        patches.add(Patch(cls, "__init__", why, ours.__wrapped__, ours))


def patch_of(cls: type) -> Any:
    """Return MindSpeed's patch of `cls.__init__`, once it is in place: it keeps what lies below it."""
    patch = features.patches().get(f"{cls.__module__}.{cls.__qualname__}.__init__")
    return None if patch is None or patch.orig_func is None else patch


def undo(patch: Patch) -> bool:
    """Undo a patch of ours that MindSpeed keeps for the original; return whether it did."""
    under = patch_of(patch.owner)
    if under is None or under.orig_func is not patch.replacement:
        return False
    _put_below(under, patch.original)
    return True


def _put_below(under: Any, function: Callable[..., None]) -> bool:
    """Have MindSpeed take `function` for the original; return whether it holds at once."""
    # To apply MindSpeed's patch again would drop a wrapper that was put over it since. With one there,
    # `function` holds from the next repatch() on, which applies all patches again.
    uncovered = vars(under.orig_module).get("__init__") is under.final_patch_func
    under.orig_func = function
    if uncovered:
        under.is_applied = False
        under.apply_patch()
    return uncovered
