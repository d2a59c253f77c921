"""Wraps a constructor so that MindSpeed and MegatronAdaptor, and their repatch(), leave our wrapper in place.

Each of the two keeps what it has patched in a registry of its own, with the original of the first time.
`repatch()` sets its own wrapper over that original again, and throws away whatever lies above. So ours lies
beneath the lowest of them, whichever came first.

Asks:     both registries of patches.
Changes:  what the lowest patch of a constructor keeps for the original.
Undone:   by `undo`, which a group calls for patches of its own that others lie over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_replay.compat.mindspeed import features
from npu_replay.compat.patching.patches import Patch, Patches

Init = Callable[..., None]


def wrap_init(patches: Patches, cls: type, wrapped: Callable[[Init], Any], why: str) -> None:
    """Replace `cls.__init__` by `wrapped(init)`, beneath the wrappers of MindSpeed and MegatronAdaptor.

    `patches` has to be made with `beneath=undo`, and `wrapped` to use functools.wraps.
    """
    pile = patches_of(cls)
    ours = wrapped(pile[0].orig_func) if pile else None
    if ours is None or not _put_below(pile, ours):
        # On top: neither product is here, or a wrapper lies over theirs until a repatch() drops it.
        patches.set(cls, "__init__", wrapped(cls.__init__), why)  # type: ignore[misc]
    if ours is not None:
        patches.add(Patch(cls, "__init__", why, ours.__wrapped__, ours))


def patches_of(cls: type) -> list[Any]:
    """Return the products' patches of `cls.__init__` that were applied, the lowest first."""
    name = f"{cls.__module__}.{cls.__qualname__}.__init__"
    found = (known[name] for known in features.registries() if name in known)
    return sorted((patch for patch in found if patch.orig_func is not None), key=_depth)


def undo(patch: Patch) -> bool:
    """Undo a patch of ours that a product keeps for the original; return whether it did."""
    pile = patches_of(patch.owner)
    for place, under in enumerate(pile):
        if under.orig_func is patch.replacement:
            _put_below(pile[place:], patch.original)
            return True
    return False


def _put_below(pile: list[Any], function: Init) -> bool:
    """Have the lowest patch take `function` for the original; return whether it holds at once."""
    owner = pile[0].orig_module
    on_top = vars(owner).get("__init__")
    # Those above the wrapper that is in place were thrown away by the repatch() of a lower one.
    in_place = next((place for place, patch in enumerate(pile) if patch.final_patch_func is on_top), None)
    below = function
    for place, patch in enumerate(pile):
        patch.orig_func = below
        if in_place is None or place <= in_place:
            patch.is_applied = False
            patch.apply_patch()
        below = patch.final_patch_func
    if in_place is None:
        # Somebody's wrapper lies above. It stays, and `function` holds from the next repatch() on.
        owner.__init__ = on_top
    return in_place is not None


def _depth(patch: Any) -> int:
    """Return how many wrappers lie in what a patch keeps for the original."""
    depth = 0
    function = patch.orig_func
    while hasattr(function, "__wrapped__"):
        depth += 1
        function = function.__wrapped__
    return depth
