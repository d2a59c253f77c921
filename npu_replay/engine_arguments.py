"""EngineArguments: what turns the capture of routes on in one release of an engine, and what it can't do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineArguments:
    """The arguments to start an engine with.

    Attributes:
        arguments: by the name of the Python argument (`enable_return_routed_experts`): those planned,
            and those that the capture needs.
        limits: what this release can't do, or does wrong, one sentence each.
        environment: variables that the engine's processes need beside them.
    """

    arguments: Mapping[str, Any]
    limits: tuple[str, ...] = field(default=())
    environment: Mapping[str, str] = field(default_factory=dict)

    def command_line(self) -> list[str]:
        """The same as options of the engine's server: `["--enable-return-routed-experts", ...]`."""
        options: list[str] = []
        for name, value in self.arguments.items():
            dashed = name.replace("_", "-")
            if value is True:
                options.append(f"--{dashed}")
            elif value is False:
                options.append(f"--no-{dashed}")
            elif value is not None:
                text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
                options += [f"--{dashed}", text]
        return options
