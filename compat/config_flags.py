"""The flags of routing replay on Megatron's configs: taken by every release, and kept on the instance.

Megatron before 0.16 doesn't know them, and MindSpeed takes any argument, but loses some on the way:

- An attribute of the class makes it drop the argument, so the flags are set on the instance alone.
- It asks for the signature of the class, so nothing is ever written there.
- `repatch()` throws away what lies over its own wrapper, so ours lies beneath, whichever came first.
- It gives each config a class of its own whose `__init__` fails, which `dataclasses.replace` would call.

What acts on the flags is not decided here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from npu_replay.compat import import_hook
from npu_replay.compat.patching import Patch, Patches

logger = logging.getLogger(__name__)

MODULE = "megatron.core.transformer.transformer_config"
CLASSES = ("TransformerConfig", "MLATransformerConfig")
REPLAY = ("enable_routing_replay", "moe_enable_routing_replay")
"""Two names of one flag: verl's, and Megatron-core's from 0.16 on."""
FLAGS = (*REPLAY, "moe_router_fusion")

_WHAT = "routing replay's flags on TransformerConfig"
_WHY = "takes the flags, and keeps them on the instance"
_makers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The config that made an init_method in its own `__post_init__`: whoever is given it was made from that."""


def install() -> None:
    """Have Megatron's configs take the flags, now or when they are imported."""
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    for name in CLASSES:
        cls = getattr(module, name, None)
        if cls is None or any(patch.owner is cls for patch in _patches):
            continue
        under = _mindspeeds(cls)
        if under is None:
            _patches.set(cls, "__init__", _config_init(cls.__init__), _WHY)
        else:
            ours = _config_init(under.orig_func)
            _patches.add(Patch(cls, "__init__", _WHY, under.orig_func, ours))
            _put_below(under, ours)


def _config_init(init: Callable[..., None]) -> Callable[..., None]:
    """`init`, with the flags that it doesn't know."""
    known = set(inspect.signature(init).parameters)

    @functools.wraps(init)
    def config_init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in FLAGS if name in kwargs and name not in known}
        init(self, *args, **kwargs)
        _mend_replace(type(self))
        _keep(self, given, kwargs.get("init_method"))

    return config_init


def _keep(config: Any, given: dict[str, Any], init_method: object) -> None:
    """Give the instance every flag; those that mean the same get the same value."""
    if init_method is None:
        _makers[config.init_method] = weakref.ref(config)
    elif (maker := _maker(init_method)) is not None:
        _take_over(config, maker, given)
    for name in FLAGS:
        setattr(config, name, given.get(name, getattr(config, name, False)))
    if any(getattr(config, name) for name in REPLAY):
        for name in REPLAY:
            setattr(config, name, True)


def _maker(init_method: Any) -> Any:
    try:
        made_by = _makers.get(init_method)
    except TypeError:  # a caller's own, which can't be hashed or referred to
        return None
    return None if made_by is None else made_by()


def _take_over(config: Any, maker: Any, given: dict[str, Any]) -> None:
    """A config that was rebuilt from the fields of another, whose own init_method it was given."""
    lost = {
        name: getattr(maker, name)
        for name in FLAGS
        if name not in given and name not in vars(config) and getattr(maker, name, False)
    }
    for name, value in lost.items():
        setattr(config, name, value)
    if lost:
        logger.info(
            "[npu_replay] a %s was made from the fields of another, without %s; taken over from there",
            type(config).__name__,
            ", ".join(f"{name}={value}" for name, value in lost.items()),
        )


def _mend_replace(cls: type) -> None:
    """Take the `__init__` off a class that MindSpeed made for one instance: the inherited one works.

    Such a class is a dataclass of its base's name that no module holds. Its own `__init__` was made without
    MindSpeed's arguments, so `dataclasses.replace` and `type(config)(...)` fail in it.
    """
    own = vars(cls)
    made = "__dataclass_fields__" in own and "__init__" in own and cls.__name__ == cls.__mro__[1].__name__
    if made and not _is_held(cls) and dataclasses.is_dataclass(cls.__mro__[1]):
        del cls.__init__  # type: ignore[misc]


def _is_held(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return getattr(module, cls.__qualname__, None) is cls or "." in cls.__qualname__


# Where MindSpeed has its own patch of the same place


def _mindspeeds(cls: type) -> Any:
    """MindSpeed's patch of the `__init__` of `cls`, once it is in place: it keeps what lies below it."""
    product: Any = sys.modules.get("mindspeed.patch_utils")
    if product is None:
        return None
    patches: dict[str, Any] = product.MindSpeedPatchesManager.patches_info
    patch = patches.get(f"{cls.__module__}.{cls.__qualname__}.__init__")
    return None if patch is None or patch.orig_func is None else patch


def _put_below(under: Any, function: Callable[..., None]) -> None:
    under.orig_func = function
    under.is_applied = False
    under.apply_patch()


def _take_from_mindspeed(patch: Patch) -> bool:
    """Undo a patch of ours that MindSpeed keeps for the original."""
    under = _mindspeeds(patch.owner)
    if under is None or under.orig_func is not patch.replacement:
        return False
    _put_below(under, patch.original)
    return True


_patches = Patches(_WHAT, beneath=_take_from_mindspeed)
