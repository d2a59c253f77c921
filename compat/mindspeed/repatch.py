"""Wraps a constructor so that MindSpeed and MegatronAdaptor, and their repatch(), leave our wrapper in place.

Each of the two keeps what it has patched, and its repatch() throws away what lies over its own wrapper. So
ours lies beneath the lowest of theirs, whichever came first, and theirs lie over each other as before.

Asks:     the registries of both products.
Changes:  what they keep for the original of the constructor; the constructor, where neither has patched it.
Undone:   in both registries. Where somebody else's wrapper keeps ours, ours passes each call on while
          npu_replay is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npu_replay.compat.mindspeed import registries
from npu_replay.compat.patching.patches import Change, Patches, switched

Init = Callable[..., None]


def wrap_init(patches: Patches, cls: Any, wrapped: Callable[[Init], Init], why: str) -> None:
    """Replace `cls.__init__` by `wrapped(init)`, beneath the wrappers of MindSpeed and MegatronAdaptor."""
    # Our functions, each with the one that it calls. There are two where somebody else's wrapper lay over the
    # products' own: ours lies over that, and beneath the products' for the next repatch.
    made: dict[Init, Init] = {}

    def ours_around(init: Init) -> Init:
        for ours, inner in made.items():
            if inner is init:
                return ours
        ours = switched(init, wrapped(init))
        made[ours] = init
        return ours

    def undo() -> None:
        _exchange(cls, lambda init: made.get(init, init))

    _exchange(cls, ours_around)
    patches.add(Change(_name(cls), why, undo, (cls, "__init__")))


def _exchange(cls: Any, exchanged: Callable[[Init], Init]) -> None:
    """Exchange the constructor at the bottom, and build what the registries have put over it anew."""
    on_top = cls.__init__
    rebuilt: dict[Init, Init] = {}
    for patch in registries.patches_of(_name(cls)):
        before = patch.final_patch_func
        patch.orig_func = rebuilt.get(patch.orig_func) or exchanged(patch.orig_func)
        if patch.is_applied:
            patch.is_applied = False
            patch.apply_patch()
            rebuilt[before] = patch.final_patch_func
    # Not what was applied last: a repatch of the lower product has taken the upper one's away, and somebody
    # else's wrapper may lie over both.
    init = rebuilt.get(on_top) or exchanged(on_top)
    if init is not super(cls, cls).__init__:
        cls.__init__ = init
    elif "__init__" in vars(cls):
        del cls.__init__  # the class had no constructor of its own


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.__init__"
