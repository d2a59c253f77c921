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
from collections.abc import Callable
from typing import Any, TypeAlias

from npu_replay.compat.megatron import made_from
from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches
from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)

MODULE = "megatron.core.transformer.transformer_config"
CLASSES = ("TransformerConfig", "MLATransformerConfig")
REPLAY = ("enable_routing_replay", "moe_enable_routing_replay")
"""Two names of one flag: verl's, and Megatron-core's from 0.16 on."""
FLAGS = (*REPLAY, "moe_router_fusion")

_WHAT = "routing replay's flags on TransformerConfig"
_WHY = "takes the flags, and keeps them on the instance"
_BUILT = "npu_replay_flag_as_built"
"""On a config: its flag of replay when it was built, to tell which of the two names was set since."""

Flags: TypeAlias = "dict[str, bool]"


def asks_for_replay(config: Any) -> bool:
    """Is the flag of routing replay on? Where its two names differ, the one that was set since counts."""
    said = {bool(getattr(config, name, False)) for name in REPLAY}
    built: bool | None = getattr(config, _BUILT, None)
    return any(said) if len(said) == 1 or built is None else not built


def install() -> None:
    """Have Megatron's configs take the flags, now or when they are imported."""
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    try:
        for name in CLASSES:
            cls = getattr(module, name, None)
            if cls is not None and not any(patch.owner is cls for patch in _patches):
                repatch.wrap_init(_patches, cls, _config_init, _WHY)
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
        rebuilt = known - {"self"} <= kwargs.keys()
        if not rebuilt:
            # The release's own name, where it is on: off it may be a default that was passed along.
            _agreed({name: kwargs[name] for name in REPLAY if kwargs.get(name)} | given, self)
        # What MindSpeed has set before it calls what lies below its wrapper.
        given = {name: vars(self)[name] for name in FLAGS if name in vars(self)} | given
        init(self, *args, **kwargs)
        _mend_replace(type(self))
        if rebuilt:
            carried = {name: kwargs[name] for name in FLAGS if name in kwargs}
            given |= _lost(self, kwargs["init_method"], given, carried)
        _keep(self, given)
        return None

    return config_init


def _keep(config: Any, given: Flags) -> None:
    """Give the instance every flag; those that mean the same get the same value.

    Args:
        config: just built.
        given: flags that were passed beside the config's own fields, so by hand.
    """
    flags = _flags(config) | given
    replay = _agreed(given, config)
    if replay is None:
        replay = any(flags[name] for name in REPLAY)
    flags |= dict.fromkeys(REPLAY, replay)
    _set(config, flags | {_BUILT: replay})
    made_from.mark(config, flags)


def _agreed(given: Flags, config: Any) -> bool | None:
    """What the two names of one flag were given as; None if neither was."""
    replay = {name: given[name] for name in REPLAY if name in given}
    if len(set(replay.values())) > 1:
        raise ReplayError(
            "two names of one flag were given different values",
            where=type(config).__name__,
            expected=f"{' or '.join(REPLAY)}, or both alike",
            got=replay,
        )
    return next(iter(replay.values()), None)


def _set(config: Any, flags: Flags) -> None:
    for name, value in flags.items():
        if not hasattr(inspect.getattr_static(type(config), name, None), "__set__"):  # a subclass' property
            setattr(config, name, value)


def _lost(new: Any, init_method: Any, given: Flags, carried: Flags) -> Flags:
    """The flags of the config that a new one was made from, field by field, if nothing was said of them.

    Args:
        new: the new one, built.
        init_method: what it was given.
        given: flags that were passed by hand.
        carried: flags that are fields of this release's configs, so they came along.

    Raises:
        ReplayError: it may have been made from several, and their flags differ.
    """
    built = made_from.said(init_method)
    if not built or given.keys() >= set(FLAGS):
        return {}
    kind = getattr(sys.modules.get(MODULE), CLASSES[0], type(new))
    sources = made_from.sources(init_method, new, kind)
    fitting = [one for one in sources if carried.items() <= _flags(one).items()]
    said = set(given)
    if not fitting:  # a field was changed on the way
        read = [_flags(one) for one in sources] or [built]
        said |= {name for name, value in carried.items() if value not in {flags[name] for flags in read}}
    if said & set(REPLAY):
        said |= set(REPLAY)
    now = _agreed_by(fitting or sources, said, new) if sources else built
    taken = {name: value for name, value in now.items() if name not in said}
    if any(taken.values()):
        logger.info("[npu_replay] a config was made from another's fields; taken over: %s", taken)
    return taken


def _flags(config: Any) -> Flags:
    return {name: bool(getattr(config, name, False)) for name in FLAGS}


def _agreed_by(sources: list[Any], said: set[str], new: Any) -> Flags:
    """What these configs say, but for flags that were given."""
    found = [_flags(one) | dict.fromkeys(REPLAY, asks_for_replay(one)) for one in sources]
    for name in set(FLAGS) - said:
        if len({flags[name] for flags in found}) > 1:
            raise ReplayError(
                f"a config was made from another's fields, and {name} can't be told",
                where=type(new).__name__,
                expected=f"{name}=True or False beside the fields, or dataclasses.replace",
                got=f"{len(found)} configs that it may have been made from, which differ in it",
                cause="copies of one config with different flags, and fields that were read elsewhere than "
                "where the constructor is called",
            )
    return found[0]


def _mend_replace(cls: type) -> None:
    """Take the `__init__` off a class that MindSpeed made for one instance: the inherited one works.

    Such a class is a dataclass of its base's name that no module holds. Its own `__init__` was made without
    MindSpeed's arguments, so `dataclasses.replace` and `type(config)(...)` fail in it.
    """
    own, base = vars(cls), cls.__mro__[1]
    made = "__dataclass_fields__" in own and "__init__" in own and cls.__name__ == base.__name__
    if made and not _is_held(cls) and any(repatch.patch_of(kind) is not None for kind in cls.__mro__[1:]):
        del cls.__init__  # type: ignore[misc]


def _is_held(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return getattr(module, cls.__qualname__, None) is cls or "." in cls.__qualname__


_patches = Patches(_WHAT, beneath=repatch.undo)
