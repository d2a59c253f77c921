"""RoutedModel: which layers of a model route, and over how many experts; read from its config.json."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_replay.errors import ReplayError

_EXPERTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
    "num_moe_experts",
)
_TOPK = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
    "moe_router_topk",
    "num_selected_experts",
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """What has to be known of a model to read a rollout engine's array of its routes.

    Attributes:
        layers: the decoder layers with a router, global and 0-based, ascending.
        num_layers: decoder layers in all, dense ones included.
        num_experts: routed experts of a layer.
        topk: experts a token in a layer.

    Raises:
        ReplayError: the numbers don't go together.
    """

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    topk: int

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        object.__setattr__(self, "layers", layers)
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or not 0 <= layers[0] <= layers[-1] < self.num_layers
        ):
            raise ReplayError(
                "these can't be the MoE layers of a model",
                where="RoutedModel",
                expected=f"ascending 0-based decoder layers below {self.num_layers}, one at least",
                got=layers,
                cause="a model without experts, or 1-based numbers (Megatron's layer_number)",
            )
        if not 1 <= self.topk <= self.num_experts:
            raise ReplayError(
                "bad top-k",
                where="RoutedModel",
                expected=f"1 to {self.num_experts} experts a token",
                got=self.topk,
            )

    @property
    def dense(self) -> tuple[int, ...]:
        """The decoder layers without a router."""
        return tuple(layer for layer in range(self.num_layers) if layer not in set(self.layers))

    @classmethod
    def of(cls, model: Any) -> RoutedModel:
        """`model` as it is if it is one, else what its config says: see `from_config`."""
        return model if isinstance(model, RoutedModel) else cls.from_config(model)

    @classmethod
    def from_config(cls, config: Any) -> RoutedModel:
        """Read a Hugging Face config.

        Args:
            config: its path or its folder's, its contents, an object with these attributes (transformers'
                PretrainedConfig), or a model that has one as `.config`. A model of several kinds of input may
                keep its language model's under `text_config`.

        Raises:
            ReplayError: a key is missing that no other stands for; names those that were looked for.
        """
        found = _Keys.of(config)
        num_layers = found.number(_LAYERS, "the number of decoder layers")
        return cls(
            layers=tuple(layer for layer in range(num_layers) if _is_routed(found, layer, num_layers)),
            num_layers=num_layers,
            num_experts=found.number(_EXPERTS, "the number of routed experts"),
            topk=found.number(_TOPK, "the experts a token"),
        )


@dataclass(frozen=True)
class _Keys:
    """A config that is asked by key; what it hasn't, or has as None, is None."""

    config: Any
    name: str

    @classmethod
    def of(cls, config: Any) -> _Keys:
        if isinstance(config, (str, os.PathLike)):
            return cls._of_file(Path(config))
        inner = getattr(config, "config", None)
        if not isinstance(config, Mapping) and inner is not None and not hasattr(config, "num_hidden_layers"):
            return cls.of(inner)
        found = cls(config, type(config).__name__)
        for key in _TEXT:
            text = found[key]
            if text is not None and not any(found[expert] is not None for expert in _EXPERTS):
                return cls.of(text)
        return found

    @classmethod
    def _of_file(cls, path: Path) -> _Keys:
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ReplayError(
                "the model's config can't be read",
                where=str(file),
                expected="a Hugging Face config.json, or the folder that it is in",
                got=error,
            ) from error
        if not isinstance(config, dict):
            raise ReplayError(
                "this isn't a model's config",
                where=str(file),
                expected="an object",
                got=type(config).__name__,
            )
        return cls.of(config)

    def __getitem__(self, key: str) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(key)
        return getattr(self.config, key, None)

    def number(self, keys: tuple[str, ...], what: str) -> int:
        for key in keys:
            value = self[key]
            if isinstance(value, (list, tuple)) and value and len(set(value)) == 1:
                value = value[0]  # the same in each layer
            try:
                number = operator.index(value)
            except TypeError:
                continue
            if number > 0:
                return number
        raise ReplayError(
            f"the model's config doesn't say {what}",
            where=self.name,
            expected=f"one of {', '.join(keys)}, above 0",
            got=", ".join(f"{key}={self[key]!r}" for key in keys if self[key] is not None) or "none of them",
            cause="a model without experts, or a family with other keys: give "
            "RoutedModel(layers=..., num_layers=..., num_experts=..., topk=...)",
        )


def _is_routed(config: _Keys, layer: int, num_layers: int) -> bool:
    """Has this decoder layer a router? Families say it in different keys; with none of them, all have one."""
    kinds = config["mlp_layer_types"]
    if isinstance(kinds, (list, tuple)) and len(kinds) == num_layers:
        return bool(kinds[layer] != "dense")
    named = config["moe_layers"]  # Llama 4
    if isinstance(named, (list, tuple)):
        return layer in named
    listed = config["moe_layers_enum"]  # Step 3
    if isinstance(listed, str):
        return str(layer) in [number.strip() for number in listed.split(",")]
    start, end = config["moe_layer_start_index"], config["moe_layer_end_index"]  # Ernie 4.5
    if isinstance(start, int):
        last = num_layers - 1 if not isinstance(end, int) or end < 0 else end
        return start <= layer <= last and (layer + 1) % (config["moe_layer_interval"] or 1) == 0
    first_dense = _first_dense(config)
    frequency = config["moe_layer_freq"]
    if isinstance(frequency, (list, tuple)):
        return layer < len(frequency) and bool(frequency[layer]) and layer >= first_dense
    if isinstance(config["expert_layer_period"], int):  # Jamba
        return layer % config["expert_layer_period"] == (config["expert_layer_offset"] or 0)
    if layer in (config["mlp_only_layers"] or ()):  # Qwen
        return False
    step = config["decoder_sparse_step"]
    if isinstance(step, int) and step > 0:
        return (layer + 1) % step == 0
    return (
        layer >= first_dense
        and layer % (frequency if isinstance(frequency, int) and frequency > 0 else 1) == 0
    )


def _first_dense(config: _Keys) -> int:
    """How many layers come before the first MoE layer."""
    for key in ("first_k_dense_replace", "num_dense_layers", "moe_first_k_dense_replace"):
        if isinstance(config[key], int):
            return int(config[key])
    return 0
