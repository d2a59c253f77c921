"""Keys: a model's config, asked by key; and what is refused by the name of a key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_replay import json_text
from npu_replay.errors import ReplayError, RouterError, shown
from npu_replay.routes.atomic_file import plain_file
from npu_replay.routes.checks import MAX_LAYERS

EXPERTS = (
    *("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"),
    *("n_experts", "num_moe_experts"),
)
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_DEEPEST = 16  # a model's config may hold its language model's
BY_HAND = "give RoutedModel(layers=..., num_layers=..., num_experts=..., topk=...)"

_LOOPS = re.compile(
    r"(^|[_.])(loops?|cycles|passes|ut_steps|recur(rence|sion)s?|(loop|recur\w*)_(num|count|depth|steps))$"
)
"""How often a forward runs some layers: Inkling-2, Dory, Ouro, LoopCoder, Huginn, HRM."""


@dataclass(frozen=True)
class Keys:
    """A config that is asked by key; what it hasn't, or has as None, is None."""

    config: Any
    name: str
    beside: tuple[Keys, ...] = ()

    @classmethod
    def of(cls, config: Any) -> Keys:
        if isinstance(config, (str, os.PathLike)):
            config = cls.of_file(Path(config))
        for _ in range(_DEEPEST):
            found = cls(config, type(config).__name__)
            # A config inside this one, that of the language model, say, is to be read in its place.
            inner = None if isinstance(config, Mapping) else getattr(config, "config", None)
            if inner is None or hasattr(config, "num_hidden_layers"):
                own = any(found[expert] is not None for expert in EXPERTS)
                inner = None if own else next((found[key] for key in _TEXT if found[key] is not None), None)
            if inner is None:
                return found
            config = inner
        raise ReplayError(
            "this config holds configs without end",
            where=found.name,
            expected=f"that of the language model, at most {_DEEPEST} deep",
            got="another one inside that",
        )

    @staticmethod
    def of_file(path: Path) -> dict[str, Any]:
        file = path
        try:
            file = path / "config.json" if path.is_dir() else path
            with plain_file(file) as opened:
                config = json_text.parse(opened.read())
        except (OSError, ValueError) as error:
            raise ReplayError(
                "the model's config can't be read",
                where=str(file),
                expected="a Hugging Face config.json, or the folder that it is in",
                got=error,
                cause="the name of a model on a hub, which isn't looked up: download it, and give its folder"
                if isinstance(error, FileNotFoundError)
                else "",
            ) from error
        if not isinstance(config, dict):
            got = type(config).__name__
            raise ReplayError("this isn't a model's config", where=str(file), expected="an object", got=got)
        return config

    def __getitem__(self, key: str) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(key)
        try:
            return getattr(self.config, key, None)
        except RuntimeError:  # transformers: each layer has its own, in per_layer_config
            return None

    def by_layer(self) -> dict[int, Keys]:
        """What the config says of single layers, in Nemotron Puzzle's way or in transformers'."""
        key = "block_configs" if self["block_configs"] is not None else "per_layer_config"
        value = None if self["is_heterogeneous"] is False else self[key]
        try:
            each = value.items() if isinstance(value, Mapping) else enumerate(value or ())
            found = {int(layer): Keys(one, f"{self.name}, {key}", (self,)) for layer, one in each}
        except (TypeError, ValueError) as error:
            raise self.unknown(key) from error
        if any(one["skip"] for one in found.values()):  # parts of a layer, by names of the family's own
            raise self.unknown(key)
        return found

    def number(self, keys: tuple[str, ...], what: str, layer: int | None = None) -> int:
        """The first of these keys that has a number above 0, by the layer where each has its own."""
        for value in (config[key] for config in (self, *self.beside) for key in keys):
            if isinstance(value, (list, tuple)) and value:
                at = 0 if all(one == value[0] for one in value) else layer
                value = None if at is None or at >= len(value) else value[at]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ReplayError(
            f"the model's config doesn't say {what}",
            where=self.name,
            expected=f"one of {', '.join(keys)}, above 0",
            got=", ".join(f"{key}={shown(self[key])}" for key in keys if self[key] is not None)
            or "none of them",
            cause=f"a model without experts, or a family with other keys: {BY_HAND}",
        )

    def whole(self, key: str) -> int | None:
        """A whole number, or None if it isn't there."""
        value = self[key]
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.unknown(key)

    def numbers(self, key: str) -> set[int]:
        """Whole numbers, in a list or in a text with commas; none if it isn't there."""
        value = self[key]
        if value is None:
            return set()
        try:
            found = {int(one) for one in (value.split(",") if isinstance(value, str) else value)}
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self.unknown(key) from error
        if len(found) > MAX_LAYERS:
            raise self.unknown(key)
        return found

    def kinds(self, key: str, num_layers: int) -> list[str]:
        """Words or letters, one a layer and perhaps more; none if it isn't there."""
        value = self[key]
        if key == "block_configs" and isinstance(value, (list, tuple, str)):
            value = [Keys(block, self.name)["block_type"] for block in value]
        if value is None:
            return []
        texts = isinstance(value, (list, tuple, str)) and all(isinstance(one, str) for one in value)
        if not texts or not num_layers <= len(value) <= MAX_LAYERS:
            raise self.unknown(key)
        return list(value)

    def unknown(self, key: str) -> ReplayError:
        """A key that says which layers have experts, in a way that isn't known here."""
        return ReplayError(
            f"the model's config says in an unknown way which layers have experts: {key}",
            where=self.name,
            expected="what transformers writes",
            got=shown(self[key], 200),
            cause=f"a model family that npu_replay doesn't know yet: {BY_HAND}",
        )


def refuse_loops(config: Keys) -> None:
    """Refuse a model that runs layers several times in one forward, by the key that says how often."""
    names = config.config if isinstance(config.config, Mapping) else dir(config.config)
    counts = {str(one): config[one] for one in names if _LOOPS.search(str(one)) or "loop" in str(one)}
    for name, inner in [*counts.items()]:  # Inkling-2's own config.json has a loop_config
        counts |= {f"{name}.{one}": inner[one] for one in inner} if isinstance(inner, Mapping) else {}
    for name, count in counts.items():
        if _LOOPS.search(name) and isinstance(count, (int, float)) and count > 1:
            raise RouterError(
                "a looped model runs some layers several times in one forward, and can't be replayed",
                where=config.name,
                expected="a model that runs each layer once",
                got=f"{name}={count}",
                cause="an engine keeps one row for a token and layer, which is one pass of several",
            )
