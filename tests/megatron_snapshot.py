"""What the modules of the Megatron-core on the path hold with npu_replay, without it, and after it.

For a process of tests/jobs.py: npu_replay is imported before Megatron or after it. The answer has a snapshot
a stage, `untouched` (where it came last), `installed`, `uninstalled`; what a second install and an uninstall
left different; and the report. Where it came last it says also what the release has by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import capabilities

MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
)
SERVED = ("megatron.core.transformer.moe.router_replay", "megatron.core.pipeline_parallel.utils")
"""Those that npu_replay serves where a release lacks them."""

Objects = dict[str, Any]

_KINDS = (ModuleType, property, classmethod, staticmethod, functools.cached_property)
"""What code is beside what can be called. Data may change: process groups, counters."""


def import_megatron() -> None:
    for name in MODULES:
        import_module(name)
    for name in SERVED:
        with contextlib.suppress(ModuleNotFoundError):
            import_module(name)


def objects() -> Objects:
    """The code in the dictionaries of Megatron's modules and of their classes, by its path.

    Of the modules that were there when this was first asked, and of those that are served: building a model
    imports more.
    """
    by_path: Objects = {}
    for name in sorted({*_seen(), *SERVED}):
        if (module := sys.modules.get(name)) is not None:
            by_path[name] = module
            for key, value in vars(module).items():
                by_path[f"{name}.{key}"] = value
                if inspect.isclass(value) and value.__module__ == name:
                    by_path |= {f"{name}.{key}.{inner}": own for inner, own in _own(value).items()}
    return {path: value for path, value in by_path.items() if _is_code(value)}


def _is_code(value: Any) -> bool:
    """Without the submodules that came later: an import makes each an attribute of its package."""
    if isinstance(value, ModuleType) and value.__name__.startswith("megatron."):
        return value.__name__ in {*_seen(), *SERVED}
    return callable(value) or isinstance(value, _KINDS)


def _own(cls: type) -> Objects:
    """What a class holds, without what typing changes itself when a subclass of a protocol is first made."""
    by_typing = any(getattr(base, "_is_protocol", False) for base in cls.__mro__)
    return {name: value for name, value in vars(cls).items() if not (by_typing and name == "__init__")}


@functools.cache
def _seen() -> tuple[str, ...]:
    return tuple(name for name in sys.modules if name == "megatron" or name.startswith("megatron."))


def differing(before: Objects, after: Objects) -> list[str]:
    """The paths at which not the very same object is."""
    missing = object()
    paths = sorted(before.keys() | after.keys())
    return [path for path in paths if before.get(path, missing) is not after.get(path, missing)]


def described(by_path: Objects) -> dict[str, str]:
    """The same for another process: where each function, class and module comes from."""
    return {path: _origin(value) for path, value in by_path.items()}


def _origin(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {getattr(value, '__file__', None)}"
    function = inspect.unwrap(value) if inspect.isroutine(value) and not hasattr(value, "__get__") else value
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"code {code.co_filename}:{code.co_firstlineno}"
    return f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


def with_npu_replay(task: Mapping[str, Any]) -> dict[str, Any]:
    """Its "came" is first or last."""
    answer: dict[str, Any] = {}
    if task["came"] == "last":
        import_megatron()
        before = objects()
        answer["untouched"] = described(before)
        answer["native"] = capabilities.natives({"product": "megatron"})
    import npu_replay
    from npu_replay.compat.patching.install import install
    from npu_replay.smoke import megatron_model

    import_megatron()
    first = objects()
    install()
    answer |= {"installed": described(first), "changed by a second install": differing(first, objects())}
    with npu_replay.compat.cpu.lend():  # so that what comes to instances alone is in the report
        megatron_model.start()
        megatron_model.model(megatron_model.config(moe_enable_routing_replay=True))
    answer["report"] = sorted(str(line) for line in npu_replay.report().patches)
    install()
    answer["report again"] = sorted(str(line) for line in npu_replay.report().patches)
    npu_replay.uninstall()
    npu_replay.uninstall()
    after = objects()
    answer |= {"uninstalled": described(after), "report after": list(map(str, npu_replay.report().patches))}
    if task["came"] == "last":
        answer["left behind"] = differing(before, after)
    return answer
