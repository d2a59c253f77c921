"""Which config another one was made from, field by field: it was given a mark of that one's.

A config's `init_method` is a partial or a closure that its own `__post_init__` has made. The mark lies there,
so it comes along with the fields, in copies, and in a pickle. Copies share it; which of them was read is told
by who calls the constructor: `dataclasses.replace`, as others who read the fields, has the config in a local
variable.
"""

from __future__ import annotations

import functools
import sys
import uuid
from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any

from npu_replay.compat.patching.live_objects import alive

_MARK = "npu_replay_mark"
"""The attribute; a plain dict, which can be unpickled where npu_replay isn't installed."""


def mark(config: Any, said: Mapping[str, bool]) -> None:
    """Leave what a config said when it was built on the init_method that it made; an earlier mark stays."""
    made = getattr(config, "init_method", None)
    closure = isinstance(made, FunctionType) and "<locals>" in made.__qualname__
    if (closure or isinstance(made, functools.partial)) and _mark_of(made) is None:
        setattr(made, _MARK, {"family": uuid.uuid4().hex, "said": dict(said)})


def said(init_method: Any) -> dict[str, bool]:
    """What the head of this family said when it was built; nothing, if there is no mark."""
    found = _mark_of(init_method)
    return {} if found is None else dict(found["said"])


def sources(init_method: Any, new: Any, kind: type) -> list[Any]:
    """The configs that `new` may have been made from; none, if they are gone.

    Those that the caller of the constructor holds; else all of the family that are alive.

    Args:
        init_method: what `new` was given.
        new: being built.
        kind: the class of configs.
    """
    is_kin = functools.partial(_is_kin, _mark_of(init_method), new, kind)
    held = {id(value): value for value in _caller(new).f_locals.values() if is_kin(value)}
    kin = list(held.values()) or [one for one in alive(kind) if is_kin(one)]
    # A deep copy has an init_method of its own.
    return [one for one in kin if vars(one)["init_method"] is init_method] or kin


def _mark_of(init_method: Any) -> dict[str, Any] | None:
    return getattr(init_method, _MARK, None)


def _is_kin(wanted: dict[str, Any] | None, new: Any, kind: type, value: object) -> bool:
    if wanted is None or value is new or not issubclass(type(value), kind):
        return False
    found = _mark_of(vars(value).get("init_method"))
    return found is not None and found["family"] == wanted["family"]


def _caller(new: Any) -> FrameType:
    """The innermost function that doesn't hold `new`: constructors and their wrappers do."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _holds(frame, new):
        frame = frame.f_back
    return frame


def _holds(frame: FrameType, new: Any) -> bool:
    values = frame.f_locals.values()
    return any(
        value is new or (type(value) is tuple and any(one is new for one in value)) for value in values
    )
