"""Refuses a job of verl's that asks for replay, in a process where npu_replay can't be imported.

It is imported where that import has failed, and nowhere else.

Asks:     the config of each worker with an actor, when it is built.
Changes:  the constructor of verl's ActorRolloutRefWorker, when its module is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_WORKERS = {f"verl.workers.{name}" for name in ("engine_workers", "megatron_workers", "fsdp_workers")}
_PLACES = ((), ("megatron",), ("fsdp_config",))
"""The sections of `actor` that have a router_replay."""


def refuse(cause: str) -> None:
    """Refuse workers with a mode from now on; `cause` is why npu_replay can't be imported."""
    sys.meta_path.insert(0, _Finder(cause))


class _Finder:
    """Finds verl's modules with workers, and guards these once they are imported."""

    def __init__(self, cause: str) -> None:
        self._cause = cause

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _WORKERS else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    def _run(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        cls: Any = getattr(module, "ActorRolloutRefWorker", None)
        if cls is not None:
            cls.__init__ = _guarded(cls.__init__, self._cause)


def _guarded(init: Callable[..., None], cause: str) -> Callable[..., None]:
    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if "actor" not in str(self.role):
            return
        for place in _PLACES:
            mode = _at(self.config, "actor", *place, "router_replay", "mode")
            if mode not in (None, "disabled"):
                key = ".".join(("actor_rollout_ref.actor", *place, "router_replay.mode"))
                raise RuntimeError(
                    f"[npu_replay] {key}={mode} asks for replay, and npu_replay can't be imported in this "
                    f"process: {cause}. Mend that, or leave out the mode. With NPU_REPLAY_AUTOLOAD=off or "
                    "NPU_REPLAY_STRICT=off the job goes on with verl's own replay"
                )

    return made


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if hasattr(config, "get") else None
    return config
