"""Reads a verl job's config, which comes as a DictConfig, a dict or a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_replay.errors import ReplayError

ROOT, OFF = "actor_rollout_ref", "disabled"
FSDP = ("fsdp", "fsdp2")
"""The strategies whose mode npu_replay reads: verl's engines carry the key, and do nothing with it."""
FLAG = "enable_rollout_routing_replay"
"""The rollout's key that asks the engine for routes."""


def setting(config: Any, *path: str) -> Any:
    """Return the value at a path of a DictConfig, dict or dataclass; None where the path ends before."""
    for name in path:
        if config is None or isinstance(config, str):
            return None
        get = getattr(config, "get", None)
        config = getattr(config, name, None) if get is None else get(name, None)
    return config


def without_keys(given: Any, key: str) -> ReplayError | None:
    """Return the error for a router_replay that is a value, no section: `router_replay=R2` sets no mode."""
    if given is None or isinstance(given, Mapping) or hasattr(given, "mode"):
        return None
    return refused(
        f"{key} is a value and no section, so it sets no mode",
        expected=f"{key}.mode=R2 (or R3)",
        got=f"{key}={given}",
        cause="the line lacks .mode",
    )


def names(section: Any) -> list[str]:
    if section is None or isinstance(section, str):
        return []
    found = section if isinstance(section, Mapping) else getattr(section, "__dict__", ())
    return [str(name) for name in found]


def whole(config: Any) -> Any:
    """Return the job's config that this one is a part of; itself, if it is a part of none."""
    root = getattr(config, "_get_root", None)
    return config if root is None else root()


def refused(problem: str, *, expected: object, got: object, cause: str) -> ReplayError:
    return ReplayError(problem, where="verl's config", expected=expected, got=got, cause=cause)
