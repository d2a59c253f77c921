"""Makes Megatron's configs take the flags of routing replay, and keep them on the instance.

Asks:     which flags the constructor knows. What acts on them is not decided here.
Changes:  `__init__` of `TransformerConfig` and `MLATransformerConfig`; `init_method` of configs with a flag.
Undone:   the constructors are put back, also from beneath wrappers of MindSpeed and MegatronAdaptor.

Megatron before 0.16 doesn't know the flags. MindSpeed drops an argument that the class has as an attribute,
and reads the signature of the class, so flags are set on instances only. Its `repatch()` drops what wraps its
own wrapper, so ours lies beneath.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches
from npu_replay.errors import ReplayError

MODULE = "megatron.core.transformer.transformer_config"
CLASSES = ("TransformerConfig", "MLATransformerConfig")
REPLAY = ("enable_routing_replay", "moe_enable_routing_replay")
"""Two names of one flag: verl's, and that of Megatron-core from 0.16 on."""
FLAGS = (*REPLAY, "moe_router_fusion")

_WHAT = "routing replay's flags on TransformerConfig"
_WHY = "takes the flags, and keeps them on the instance"
_BUILT = "npu_replay_flag_as_built"
"""The attribute with the flag's value at construction, to tell which of the two names was set since."""

_CARRIED = "npu_replay_flags"
"""The attribute of `init_method` with the flags at construction that this release has no fields for."""

Flags: TypeAlias = "dict[str, bool]"


def asks_for_replay(config: Any) -> bool:
    """Return whether a config's flag of routing replay is on; if its names differ, the one set last counts.

    >>> from types import SimpleNamespace
    >>> from npu_replay.compat.megatron.config_flags import asks_for_replay
    >>> asks_for_replay(SimpleNamespace(enable_routing_replay=True))
    True
    """
    values = {bool(getattr(config, name, False)) for name in REPLAY}
    built: bool | None = getattr(config, _BUILT, None)
    return any(values) if len(values) == 1 or built is None else not built


def install() -> None:
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    for name in CLASSES:
        cls = getattr(module, name, None)
        if cls is not None and not _patches.has(cls, "__init__"):
            repatch.wrap_init(_patches, cls, _config_init, _WHY)


def _config_init(init: Callable[..., None]) -> Any:
    known = set(inspect.signature(init).parameters)
    lacking = set(FLAGS) - known
    if known & set(REPLAY):
        lacking -= set(REPLAY)

    @functools.wraps(init)
    def config_init(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = {name: kwargs.pop(name) for name in FLAGS if name in kwargs and name not in known}
        # MindSpeed sets attributes before it calls the constructor beneath its wrapper.
        asked: Flags = {name: vars(self)[name] for name in FLAGS if name in vars(self)} | unknown
        carried: Flags = {}
        if known - {"self"} <= kwargs.keys():  # made from all fields of another
            carried = getattr(kwargs["init_method"], _CARRIED, {})
        else:
            # The release's own name counts where it is on; off, it may be a default that was passed along.
            asked |= {name: kwargs[name] for name in REPLAY if kwargs.get(name)}
        values = {name: asked[name] for name in REPLAY if name in asked}
        ReplayError.unless(
            len(set(values.values())) < 2,
            "two names of one flag were given different values",
            where=type(self).__name__,
            expected=f"{' or '.join(REPLAY)}, or both alike",
            got=values,
        )
        init(self, *args, **kwargs)
        flags = {name: bool(getattr(self, name, False)) for name in FLAGS} | carried | asked
        replay = any(values.values() if values else (flags[name] for name in REPLAY))
        flags |= dict.fromkeys(REPLAY, replay)
        for name, value in {**flags, _BUILT: replay}.items():
            if not hasattr(inspect.getattr_static(type(self), name, None), "__set__"):  # a subclass' property
                setattr(self, name, value)
        _carry(self, {name: flags[name] for name in sorted(lacking)})

    return config_init


def _carry(config: Any, flags: Flags) -> None:
    """Put the flags that are no fields on the config's `init_method`, which is copied with the fields.

    This is a hack: the function carries them into a config that is made from all fields of this one.
    """
    made = getattr(config, "init_method", None)
    if callable(made) and (any(flags.values()) or hasattr(made, _CARRIED)):
        config.init_method = functools.partial(made)
        setattr(config.init_method, _CARRIED, flags)


_patches = Patches(_WHAT)
