"""Makes Megatron's configs take the flags of routing replay, and keep them on the instance.

Asks:     which flags the constructor knows. What acts on them is not decided here.
Changes:  `__init__` of `TransformerConfig` and `MLATransformerConfig`.
Undone:   the constructors are put back, also from beneath wrappers of MindSpeed and MegatronAdaptor.

Megatron before 0.16 doesn't know the flags. MindSpeed drops an argument that the class has as an attribute,
and reads the signature of the class, so flags are set on instances only. Its `repatch()` drops what wraps its
own wrapper, so ours lies beneath.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches

MODULE = "megatron.core.transformer.transformer_config"
CLASSES = ("TransformerConfig", "MLATransformerConfig")
REPLAY = ("enable_routing_replay", "moe_enable_routing_replay")
"""Two names of one flag: verl's, and that of Megatron-core from 0.16 on."""
FLAGS = (*REPLAY, "moe_router_fusion")

_WHAT = "routing replay's flags on TransformerConfig"
_WHY = "takes the flags, and keeps them on the instance"


def asks_for_replay(config: Any) -> bool:
    """Return whether a config's flag of routing replay is on, by either name.

    >>> from types import SimpleNamespace
    >>> from npu_replay.compat.megatron.config_flags import asks_for_replay
    >>> asks_for_replay(SimpleNamespace(enable_routing_replay=True))
    True
    """
    return any(getattr(config, name, False) for name in REPLAY)


def install() -> None:
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    for name in CLASSES:
        cls = getattr(module, name, None)
        if cls is not None and not _patches.has(cls, "__init__"):
            repatch.wrap_init(_patches, cls, _config_init, _WHY)


def _config_init(init: Callable[..., None]) -> Any:
    lacking = set(FLAGS) - set(inspect.signature(init).parameters)

    @functools.wraps(init)
    def config_init(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = {name: kwargs.pop(name) for name in lacking if name in kwargs}
        init(self, *args, **kwargs)
        # What isn't passed here MindSpeed may have set before it calls the constructor beneath its wrapper.
        flags = {name: bool(getattr(self, name, False)) for name in FLAGS} | unknown
        replay = any(flags[name] for name in REPLAY)
        for name, value in (flags | dict.fromkeys(REPLAY, replay)).items():
            setattr(self, name, value)

    return config_init


_patches = Patches(_WHAT)
