"""Makes Megatron's configs take the flags of routing replay, and keep them on the instance.

Asks:     which flags the constructor knows. What acts on them is not decided here.
Changes:  `__init__` of `TransformerConfig` and `MLATransformerConfig`; a mark on a config's `init_method`.
Undone:   the constructors are put back, also from beneath wrappers of MindSpeed and MegatronAdaptor. Marks
          mean nothing then.

Megatron before 0.16 doesn't know the flags. MindSpeed drops an argument that the class has as an attribute,
and reads the signature of the class, so flags are set on instances only. Its `repatch()` drops what wraps its
own wrapper, so ours lies beneath. It gives each config a class whose `__init__` fails in dataclasses.replace.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import logging
import sys
import uuid
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, TypeAlias

from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches
from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)

MODULE = "megatron.core.transformer.transformer_config"
CLASSES = ("TransformerConfig", "MLATransformerConfig")
REPLAY = ("enable_routing_replay", "moe_enable_routing_replay")
"""Two names of one flag: verl's, and that of Megatron-core from 0.16 on."""
FLAGS = (*REPLAY, "moe_router_fusion")

_WHAT = "routing replay's flags on TransformerConfig"
_WHY = "takes the flags, and keeps them on the instance"
_BUILT = "npu_replay_flag_as_built"
"""The attribute with the flag's value at construction, to tell which of the two names was set since."""

Flags: TypeAlias = "dict[str, bool]"


def asks_for_replay(config: Any) -> bool:
    """Return whether a config's flag of routing replay is on; if its names differ, the one set last counts.

    >>> from types import SimpleNamespace
    >>> from npu_replay.compat.megatron.config_flags import asks_for_replay
    >>> asks_for_replay(SimpleNamespace(enable_routing_replay=True))
    True
    """
    said = {bool(getattr(config, name, False)) for name in REPLAY}
    built: bool | None = getattr(config, _BUILT, None)
    return any(said) if len(said) == 1 or built is None else not built


def install() -> None:
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    try:
        for name in CLASSES:
            cls = getattr(module, name, None)
            if cls is not None and not _patches.has(cls, "__init__"):
                repatch.wrap_init(_patches, cls, _config_init, _WHY)
    except Exception:
        _patches.undo()  # all or nothing
        raise


def _config_init(init: Callable[..., None]) -> Any:
    known = set(inspect.signature(init).parameters)

    @functools.wraps(init)
    def config_init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in FLAGS if name in kwargs and name not in known}
        rebuilt = known - {"self"} <= kwargs.keys()
        if not rebuilt:
            # The release's own name counts where it is on; off, it may be a default that was passed along.
            _agreed({name: kwargs[name] for name in REPLAY if kwargs.get(name)} | given, self)
        # MindSpeed sets attributes before it calls the constructor beneath its wrapper.
        given = {name: vars(self)[name] for name in FLAGS if name in vars(self)} | given
        init(self, *args, **kwargs)
        _mend_replace(type(self))
        if rebuilt:
            carried = {name: kwargs[name] for name in FLAGS if name in kwargs}
            given |= _taken_over(self, kwargs["init_method"], given, carried)
        # Every flag is set on the config; `given` are those passed beside its own fields.
        flags, replay = _flags(self) | given, _agreed(given, self)
        if replay is None:
            replay = any(flags[name] for name in REPLAY)
        flags |= dict.fromkeys(REPLAY, replay)
        for name, value in {**flags, _BUILT: replay}.items():
            if not hasattr(inspect.getattr_static(type(self), name, None), "__set__"):  # a subclass' property
                setattr(self, name, value)
        # The mark lies on the `init_method` that the config made; an earlier mark stays.
        made = getattr(self, "init_method", None)
        closure = isinstance(made, FunctionType) and "<locals>" in made.__qualname__
        if (closure or isinstance(made, functools.partial)) and not hasattr(made, _MARK):
            setattr(made, _MARK, {"family": uuid.uuid4().hex, "said": flags})
        return None

    return config_init


def _agreed(given: Flags, config: Any) -> bool | None:
    """Return the value of the flag with two names; None if neither was given."""
    replay = {name: given[name] for name in REPLAY if name in given}
    expected, where = f"{' or '.join(REPLAY)}, or both alike", type(config).__name__
    problem = "two names of one flag were given different values"
    ReplayError.unless(len(set(replay.values())) < 2, problem, expected, replay, "", where)
    return next(iter(replay.values()), None)


def _flags(config: Any) -> Flags:
    return {name: bool(getattr(config, name, False)) for name in FLAGS}


def _mend_replace(cls: type) -> None:
    """Delete each `__init__` that MindSpeed or MegatronAdaptor made for one config's class.

    It breaks dataclasses.replace; the inherited constructor works.
    """
    # Such a class is a dataclass of its base's name that no module holds. Each of the two products makes one.
    for kind, base in itertools.pairwise(cls.__mro__):
        own = vars(kind)
        made = "__dataclass_fields__" in own and "__init__" in own and kind.__name__ == base.__name__
        module = sys.modules.get(kind.__module__)
        held = "." in kind.__qualname__ or getattr(module, kind.__qualname__, None) is kind
        if made and not held and any(map(repatch.is_patched, kind.__mro__[1:])):
            del kind.__init__  # type: ignore[misc]


# Configs that are made from the fields of another
#
# The `init_method` of a config is a partial or closure made by its own `__post_init__`. The mark lies on it,
# so it comes along with the fields, in copies and in a pickle. Copies share it: the caller of the constructor
# tells which of them was read, because `dataclasses.replace`, as others who read the fields, has that config
# in a local variable.

_MARK = "npu_replay_mark"
"""The mark's attribute; a plain dict, which can be unpickled where npu_replay isn't installed."""


def _taken_over(new: Any, init_method: Any, given: Flags, carried: Flags) -> Flags:
    """Return the flags of the config whose fields a new one was made from, where none were given.

    `given` were passed by hand; `carried` are fields of this release's configs, so they came along.
    """
    mark = getattr(init_method, _MARK, None)
    if mark is None or given.keys() >= set(FLAGS):
        return {}
    sources = _sources(init_method, mark["family"], new)
    fitting = [one for one in sources if carried.items() <= _flags(one).items()]
    said = set(given)
    if not fitting:  # a field was changed in between
        read = [_flags(one) for one in sources] or [mark["said"]]
        said |= {name for name, value in carried.items() if value not in {flags[name] for flags in read}}
    if said & set(REPLAY):
        said |= set(REPLAY)
    found = [_flags(one) | dict.fromkeys(REPLAY, asks_for_replay(one)) for one in fitting or sources] or [
        mark["said"]
    ]
    cause = (
        "copies of one config with different flags, and fields that were read elsewhere than where the "
        "constructor is called"
    )
    for name in set(FLAGS) - said:
        problem = f"a config was made from another's fields, and {name} can't be told"
        expected = f"{name}=True or False beside the fields, or dataclasses.replace"
        got = f"{len(found)} configs that it may have been made from, which differ in it"
        alike = len({flags[name] for flags in found}) < 2
        ReplayError.unless(alike, problem, expected, got, cause, type(new).__name__)
    taken = {name: value for name, value in found[0].items() if name not in said}
    if any(taken.values()):
        logger.info("[npu_replay] a config was made from another's fields; taken over: %s", taken)
    return taken


def _sources(init_method: Any, family: str, new: Any) -> list[Any]:
    """Return the configs, held by the constructor's caller or alive, that `new` may have been made from."""
    kind = getattr(sys.modules.get(MODULE), CLASSES[0], type(new))

    def is_kin(value: object) -> bool:
        if value is new or not issubclass(type(value), kind):
            return False
        mark = getattr(vars(value).get("init_method"), _MARK, None)
        return mark is not None and mark["family"] == family

    def holds(value: object) -> bool:
        return value is new or (type(value) is tuple and any(one is new for one in value))

    # The caller is the innermost frame that doesn't hold `new`: those of constructors and wrappers do.
    # Not this frame itself: its f_locals, which it keeps, would hold it and `new` in a cycle.
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and any(map(holds, frame.f_locals.values())):
        frame = frame.f_back
    held = {id(value): value for value in frame.f_locals.values() if is_kin(value)}
    kin = list(held.values()) or [one for one in gc.get_objects() if is_kin(one)]
    # A deep copy has an init_method of its own.
    return [one for one in kin if vars(one)["init_method"] is init_method] or kin


_patches = Patches(_WHAT)
