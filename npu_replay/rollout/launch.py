"""EngineArguments: what turns the capture of routes on in one release of an engine, and what it can't do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_replay.errors import ReplayError
from npu_replay.rollout.releases import Releases


@dataclass(frozen=True, kw_only=True)
class Limit(Releases):
    """What releases can't do, or do wrong, whatever they are started with: one sentence."""

    words: str


def limits_of(table: Iterable[Limit], version: str, device: str) -> list[str]:
    """The sentences of a table that hold of that release, there."""
    return [limit.words for limit in table if limit.holds(version, device)]


@dataclass(frozen=True)
class EngineArguments:
    """The arguments to start an engine with.

    Attributes:
        arguments: by the name of the Python argument (`enable_return_routed_experts`): those planned,
            and those that the capture needs.
        limits: what this release can't do, or does wrong, one sentence each.
        environment: variables that the engine's processes need beside them.
        negates: does its server know `--no-...`? Else what is False is what it does anyway.
    """

    arguments: Mapping[str, Any]
    limits: tuple[str, ...] = field(default=())
    environment: Mapping[str, str] = field(default_factory=dict)
    negates: bool = True

    def command_line(self) -> list[str]:
        """The same as options of the engine's server: `["--enable-return-routed-experts", ...]`. What is None
        is left out.

        Raises:
            ReplayError: an argument can't be written as text.
        """
        return [word for name, value in self.arguments.items() for word in self._option(name, value)]

    def _option(self, name: str, value: Any) -> list[str]:
        dashed = name.replace("_", "-")
        if value is None or (value is False and not self.negates):
            return []
        if isinstance(value, bool):
            return [f"--{dashed}" if value else f"--no-{dashed}"]
        if isinstance(value, (list, tuple)):
            return [f"--{dashed}", *(_text(name, one) for one in value)] if value else []
        return [f"--{dashed}", _text(name, value)]


def _text(name: str, value: Any) -> str:
    if isinstance(value, (str, int, float, os.PathLike)):
        return str(value)
    try:
        if isinstance(value, Mapping):
            return json.dumps(dict(value))
    except (TypeError, ValueError):
        pass  # something in it
    raise ReplayError(
        "this argument can't be given on a command line",
        where=name,
        expected="text, a number, a list of them, or a dict that can be JSON",
        got=type(value).__name__,
        cause="an object of the engine's own: start it in Python, with `arguments`",
    )
