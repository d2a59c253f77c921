"""The flags of routing replay on Megatron's configs: taken by every release, and kept on the instance.

Megatron before 0.16 doesn't know them, and MindSpeed takes any argument, but loses some on the way:

- An attribute of the class makes it drop the argument, so the flags are set on the instance alone.
- It asks for the signature of the class, so nothing is ever written there.
- `repatch()` throws away what lies over its own wrapper, so ours lies beneath (`beneath_mindspeed`).
- It gives each config a class of its own whose `__init__` fails, which `dataclasses.replace` would call.

What acts on the flags is not decided here.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

from npu_replay.compat import beneath_mindspeed, import_hook
from npu_replay.compat.patching import Patches
from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)

MODULE = "megatron.core.transformer.transformer_config"
CLASSES = ("TransformerConfig", "MLATransformerConfig")
REPLAY = ("enable_routing_replay", "moe_enable_routing_replay")
"""Two names of one flag: verl's, and Megatron-core's from 0.16 on."""
FLAGS = (*REPLAY, "moe_router_fusion")

_WHAT = "routing replay's flags on TransformerConfig"
_WHY = "takes the flags, and keeps them on the instance"
_TOKEN = "npu_replay_flags"
"""On an init_method that a config made: the flags, for copies; a copied config has a copied init_method."""
_makers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The config that made an init_method in its own `__post_init__`: whoever is given it was made from that."""

Flags: TypeAlias = "dict[str, bool]"


def asks_for_replay(config: Any) -> bool:
    """Is the flag of routing replay on, by either name?"""
    return any(getattr(config, flag, False) for flag in REPLAY)


def install() -> None:
    """Have Megatron's configs take the flags, now or when they are imported."""
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    try:
        for name in CLASSES:
            cls = getattr(module, name, None)
            if cls is not None and not any(patch.owner is cls for patch in _patches):
                beneath_mindspeed.wrap_init(_patches, cls, _config_init, _WHY)
    except Exception:
        _patches.undo()  # all or nothing
        raise


def _config_init(init: Callable[..., None]) -> Any:
    """`init`, with the flags that it doesn't know."""
    known = set(inspect.signature(init).parameters)

    @functools.wraps(init)
    def config_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not list(_patches):
            return init(self, *args, **kwargs)  # uninstalled, and somebody still calls it
        given = {name: kwargs.pop(name) for name in FLAGS if name in kwargs and name not in known}
        # What MindSpeed has set before it calls what lies below its wrapper.
        given = {name: vars(self)[name] for name in FLAGS if name in vars(self)} | given
        rebuilt = known - {"self"} <= kwargs.keys()
        init(self, *args, **kwargs)
        _mend_replace(type(self))
        if rebuilt:
            carried = {name: kwargs[name] for name in FLAGS if name in kwargs}
            given |= _lost(kwargs["init_method"], given, carried)
        _keep(self, given)
        return None

    return config_init


def _keep(config: Any, given: Flags) -> None:
    """Give the instance every flag; those that mean the same get the same value.

    Args:
        config: just built.
        given: flags that were passed beside the config's own fields, so by hand.
    """
    flags = {name: bool(getattr(config, name, False)) for name in FLAGS} | given
    replay = _agreed({name: given[name] for name in REPLAY if name in given}, config)
    if replay is None:
        replay = any(flags[name] for name in REPLAY)
    _set(config, flags | dict.fromkeys(REPLAY, replay))
    _remember(config)


def _agreed(given: Flags, config: Any) -> bool | None:
    """What the two names of one flag were given as; None if neither was."""
    if len(set(given.values())) > 1:
        raise ReplayError(
            "two names of one flag were given different values",
            where=type(config).__name__,
            expected=f"{' or '.join(REPLAY)}, or both alike",
            got=given,
        )
    return next(iter(given.values()), None)


def _set(config: Any, flags: Flags) -> None:
    for name, value in flags.items():
        if not hasattr(inspect.getattr_static(type(config), name, None), "__set__"):  # a subclass' property
            setattr(config, name, value)


def _remember(config: Any) -> None:
    """Note who made an init_method of its own, as Megatron's configs do: partials and closures."""
    made: Any = getattr(config, "init_method", None)
    closure = isinstance(made, FunctionType) and "<locals>" in made.__qualname__
    if (closure or isinstance(made, functools.partial)) and made not in _makers:
        _makers[made] = weakref.ref(config)
        setattr(made, _TOKEN, {name: getattr(config, name, False) for name in FLAGS})


def _lost(made: Any, given: Flags, carried: Flags) -> Flags:
    """The flags of the config that a new one was rebuilt from, field by field, if nothing was said of them.

    Args:
        made: the new one's init_method. That of a config which made its own tells which it is.
        given: flags that were passed by hand.
        carried: flags that are fields of this release's configs, so they came along.
    """
    built: Flags = getattr(made, _TOKEN, {})
    maker = _makers[made]() if built and made in _makers else None
    now = {name: bool(getattr(maker, name, value)) for name, value in built.items()}
    said = given.keys() | {name for name, value in carried.items() if value != now.get(name, value)}
    changed = [now[name] for name in REPLAY if name in now and now[name] != built[name]]
    if changed:  # one name of the two was set since
        now |= dict.fromkeys(REPLAY, changed[0])
    if said & set(REPLAY):
        said |= set(REPLAY)
    taken: Flags = {name: value for name, value in now.items() if (value or changed) and name not in said}
    if any(taken.values()):
        logger.info("[npu_replay] a config was made from another's fields; taken over: %s", taken)
    return taken


def _mend_replace(cls: type) -> None:
    """Take the `__init__` off a class that MindSpeed made for one instance: the inherited one works.

    Such a class is a dataclass of its base's name that no module holds. Its own `__init__` was made without
    MindSpeed's arguments, so `dataclasses.replace` and `type(config)(...)` fail in it.
    """
    own, base = vars(cls), cls.__mro__[1]
    made = "__dataclass_fields__" in own and "__init__" in own and cls.__name__ == base.__name__
    if (
        made
        and not _is_held(cls)
        and any(beneath_mindspeed.patch_of(kind) is not None for kind in cls.__mro__[1:])
    ):
        del cls.__init__  # type: ignore[misc]


def _is_held(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return getattr(module, cls.__qualname__, None) is cls or "." in cls.__qualname__


_patches = Patches(_WHAT, beneath=beneath_mindspeed.undo)
