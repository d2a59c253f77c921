"""RoutedModel: reads from a model's config which layers route, and over how many experts."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from npu_replay.errors import ReplayError, RouterError, shown, whole_number
from npu_replay.routers import Router, check_alike
from npu_replay.routes.checks import MAX_EXPERTS

_EXPERTS = (
    *("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"),
    *("n_experts", "num_moe_experts"),
)
_TOPK = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    *("experts_per_token", "moe_router_topk", "num_selected_experts"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_KINDS: dict[str, tuple[str, ...]] = {
    "block_configs": ("moe",),  # Nemotron Puzzle
    "mlp_layer_types": ("sparse", "moe", "hash_moe"),
    "layers_block_type": ("moe",),  # Nemotron-H
    "hybrid_override_pattern": ("E",),  # Nemotron-H's own config.json
}
"""Maps keys that list the kind of each layer to the words for a layer with experts."""
_FIRST = (
    *("first_k_dense_replace", "moe_first_k_dense_replace", "num_dense_layers"),
    *("moe_layer_start_index", "dense_mlp_idx"),  # Ernie 4.5, Inkling
)
_STEP = (
    *("decoder_sparse_step", "interleave_moe_layer_step"),  # Qwen, Llama 4
    *("moe_layer_interval", "moe_layer_frequency"),  # Ernie 4.5, Arctic
)
_RULES = (*_FIRST, *_STEP, "expert_layer_period", "mlp_only_layers", "enable_moe_block")
"""The keys that tell which layers are dense, Jamba's, Qwen's and Gemma 4's included."""
_LOOPS = re.compile(
    r"(^|[_.])(loops?|cycles|passes|ut_steps|recur(rence|sion)s?|(loop|recur\w*)_(num|count|depth|steps))$"
)
"""Matches keys that count the passes over some layers: Inkling-2, Dory, Ouro, LoopCoder, Huginn, HRM."""
_MODELSLIM = "quant_model_description.json"
_OF_CLASS = "the family's class knows it: give transformers' config of the model (AutoConfig.from_pretrained)"
_BY_HAND = "give RoutedModel(layers=..., num_layers=..., num_experts=..., topk=...)"


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """Describes what a reader must know of a model to decode a rollout engine's array of its routes.

    Attributes:
        layers: the decoder layers with a router, global and 0-based, ascending.
        num_layers: the number of decoder layers, dense ones included.
        num_experts: routed experts of a layer.
        topk: experts per token in a layer.
        hashed: the decoder layers that look their experts up by token id (DeepSeek-V4). An engine reports
            them; every pass chooses the same experts there, so nothing is replayed.

    Raises:
        ReplayError: the numbers don't fit together.
    """

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    topk: int
    hashed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "topk"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        for name in ("layers", "hashed"):
            object.__setattr__(self, name, tuple(map(operator.index, getattr(self, name))))
        whole_number(self.num_experts, "number of experts", "RoutedModel", least=1, most=MAX_EXPERTS)
        layers = self.layers
        every = [*self.layers, *self.hashed]
        ascending = bool(layers) and list(layers) == sorted(layers) and len(set(every)) == len(every)
        ReplayError.unless(
            ascending and 0 <= min(every) <= max(every) < self.num_layers,
            "these can't be the MoE layers of a model",
            f"ascending 0-based decoder layers below {self.num_layers}, one at least",
            shown(layers, 200) + (f", hashed {shown(self.hashed, 200)}" if self.hashed else ""),
            "a model without experts, or 1-based numbers (Megatron's layer_number)",
            "RoutedModel",
        )
        whole_number(self.topk, "top-k", "RoutedModel", least=1, most=self.num_experts)

    @property
    def dense(self) -> tuple[int, ...]:
        """Return the decoder layers without experts."""
        return tuple(sorted({*range(self.num_layers)} - {*self.layers, *self.hashed}))

    @property
    def sparse(self) -> tuple[int, ...]:
        """Return the decoder layers with experts, `layers` and `hashed`, ascending."""
        return tuple(sorted((*self.layers, *self.hashed)))

    def routed_columns(self, columns: int) -> slice | list[int] | None:
        """Return where `layers` are among an engine's columns: all decoder layers, or those with experts."""
        labels = range(self.num_layers) if columns == self.num_layers else self.sparse
        if len(labels) != columns:
            return None
        # A slice copies nothing.
        wanted = [labels.index(layer) for layer in self.layers]
        return slice(wanted[0], wanted[-1] + 1) if wanted[-1] - wanted[0] == len(wanted) - 1 else wanted

    @classmethod
    def of_module(cls, module: nn.Module, routers: Sequence[Router]) -> RoutedModel:
        """Describe a transformers model, or its wrapper (PEFT's, DDP), by the routers found in it."""
        configs = (getattr(inner, "config", None) for inner in module.modules())
        config: Any = next(
            (config_there for config_there in configs if hasattr(config_there, "get_text_config")), None
        )
        if config is None:
            raise ReplayError(
                "the number of decoder layers isn't known",
                expected="a model of transformers",
                got=f"{type(module).__name__}, without a config",
            )
        check_alike({f"layer {router.label}": (router.topk, router.num_experts) for router in routers})
        _refuse_loops(_Keys.of(config))
        return cls(
            layers=tuple(router.label for router in routers),
            num_layers=int(config.get_text_config().num_hidden_layers),
            num_experts=routers[0].num_experts,
            topk=routers[0].topk,
        )

    @classmethod
    def of(cls, model: Any) -> RoutedModel:
        """Return `model` itself if it is a RoutedModel, else what `from_config` reads from it."""
        return model if isinstance(model, RoutedModel) else cls.from_config(model)

    @classmethod
    def from_config(cls, config: Any) -> RoutedModel:
        """Read a Hugging Face config.

        >>> mixtral = {"num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2}
        >>> npu_replay.RoutedModel.from_config(mixtral)
        RoutedModel(layers=(0, 1, 2), num_layers=3, num_experts=8, topk=2, hashed=())

        Args:
            config: its path or its folder's, its contents, an object with these attributes (transformers'
                PretrainedConfig), or a model that has one as `.config`. A multimodal model may keep its
                language model's under `text_config`.

        Raises:
            ReplayError: a required key is missing; the error names the keys that were looked for.
            RouterError: layers differ in top-k or experts, or run several times in one forward.
        """
        keys = _Keys.of(config)
        _refuse_loops(keys)
        blocks = keys["block_configs"] or keys["layers_block_type"]  # Nemotron-H saves no other number
        counted = isinstance(blocks, (list, tuple)) and keys["num_hidden_layers"] is None
        num_layers = len(blocks) if counted else keys.number(_LAYERS, "the number of decoder layers")
        ReplayError.unless(
            not (zeros := keys.whole("zero_expert_num")),  # LongCat: ids above those of the routed experts
            "a model with zero experts can't be read from its config",
            "routed experts only",
            f"zero_expert_num={shown(zeros)}",
            f"a family that counts layers and experts in its own way: {_BY_HAND}",
            keys.name,
        )
        own = keys.by_layer()
        without = {layer for layer, layer_keys in own.items() if 0 in map(layer_keys.__getitem__, _EXPERTS)}
        sparse = [layer for layer in _sparse_layers(keys, num_layers) if layer not in without]
        # DeepSeek-V4 looks the experts of some layers up by token id.
        kinds = keys.kinds("mlp_layer_types", num_layers)
        first = keys.whole("num_hash_layers") or 0
        hashed = tuple(layer for layer in sparse if (kinds[layer] == "hash_moe" if kinds else layer < first))
        numbers = {}
        for layer in sparse or [0]:
            config = own.get(layer, keys)
            experts = config.number(_EXPERTS, "the number of routed experts", layer)
            topk = config.number(_TOPK, "the experts a token", layer)
            numbers[f"{config.name}, layer {layer}"] = topk, experts
        check_alike(numbers)
        layers = tuple(layer for layer in sparse if layer not in hashed)
        return cls(layers=layers, num_layers=num_layers, num_experts=experts, topk=topk, hashed=hashed)


@dataclass(frozen=True)
class _Keys:
    """Reads a config by key; a key that is missing or None gives None."""

    config: Any
    name: str
    beside: tuple[_Keys, ...] = ()

    @classmethod
    def of(cls, config: Any) -> _Keys:
        if isinstance(config, (str, os.PathLike)):
            return cls._innermost(cls.of_file(Path(config)), str(config))
        return cls._innermost(config, type(config).__name__)

    @classmethod
    def _innermost(cls, config: Any, name: str) -> _Keys:
        """Return the keys of the language model's config, which may lie in another model's."""
        keys = cls(config, name)
        inner = None if isinstance(config, Mapping) else getattr(config, "config", None)
        if inner is None or hasattr(config, "num_hidden_layers"):
            own = any(keys[expert] is not None for expert in _EXPERTS)
            inner = None if own else next((keys[key] for key in _TEXT if keys[key] is not None), None)
        return keys if inner is None else cls._innermost(inner, name)

    @staticmethod
    def of_file(path: Path) -> dict[str, Any]:
        file = path
        hub = "the name of a model on a hub, which isn't looked up: download it, and give its folder"
        try:
            file = path / "config.json" if path.is_dir() else path
            config: dict[str, Any] = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            is_missing = isinstance(error, FileNotFoundError)
            raise ReplayError(
                "the model's config can't be read",
                where=str(file),
                expected="a Hugging Face config.json, or its folder",
                got=error,
                cause=hub if is_missing else "",
            ) from error
        kind = type(config).__name__
        ReplayError.unless(kind == "dict", "this isn't a model's config", "an object", kind, where=str(file))
        return config

    def __getitem__(self, key: str) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(key)
        try:
            return getattr(self.config, key, None)
        except RuntimeError:  # transformers: each layer has its own, in per_layer_config
            return None

    def by_layer(self) -> dict[int, _Keys]:
        """Return the keys that the config sets for single layers, as Nemotron Puzzle or transformers do."""
        key = "block_configs" if self["block_configs"] is not None else "per_layer_config"
        value = None if self["is_heterogeneous"] is False else self[key]
        try:
            each = value.items() if isinstance(value, Mapping) else enumerate(value or ())
            by_layer = {
                int(layer): _Keys(layer_config, f"{self.name}, {key}", (self,))
                for layer, layer_config in each
            }
            if any(keys["skip"] for keys in by_layer.values()):
                raise ValueError("parts of a layer, by names of the family's own")
        except (TypeError, ValueError) as error:
            raise self.unknown(key) from error
        return by_layer

    def number(self, keys: tuple[str, ...], what: str, layer: int | None = None) -> int:
        """Return the first number above 0 under one of these keys; `layer` picks from a list."""
        of_experts = [] if self["ffn_config"] is None else [_Keys(self["ffn_config"], self.name)]  # DBRX
        for value in (config[key] for config in (self, *self.beside, *of_experts) for key in keys):
            if isinstance(value, (list, tuple)) and value:
                at = 0 if all(number == value[0] for number in value) else layer
                value = None if at is None or at >= len(value) else value[at]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        values = [f"{key}={shown(self[key])}" for key in keys if self[key] is not None]
        raise ReplayError(
            f"the model's config doesn't say {what}",
            where=self.name,
            expected=f"one of {', '.join(keys)}, above 0",
            got=", ".join(values) or "none of them",
            cause=f"a model without experts, or other keys: {_BY_HAND}",
        )

    def whole(self, key: str) -> int | None:
        """Return a whole number, or None if the key isn't there."""
        value = self[key]
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.unknown(key)

    def numbers(self, key: str) -> set[int]:
        """Return whole numbers, given as a list or as text with commas; an empty set for a missing key."""
        value = self[key]
        if value is None:
            return set()
        try:
            layers = {int(layer) for layer in (value.split(",") if isinstance(value, str) else value)}
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self.unknown(key) from error
        return layers

    def kinds(self, key: str, num_layers: int) -> list[str]:
        """Return words or letters, at least one per layer; an empty list for a missing key."""
        value = self[key]
        if key == "block_configs" and isinstance(value, (list, tuple, str)):
            value = [_Keys(block, self.name)["block_type"] for block in value]
        if value is None:
            return []
        texts = isinstance(value, (list, tuple, str)) and all(isinstance(text, str) for text in value)
        if not texts or len(value) < num_layers:
            raise self.unknown(key)
        return list(value)

    def unknown(self, key: str) -> ReplayError:
        """Make the error about a key that says in an unknown way which layers have experts."""
        return ReplayError(
            f"the model's config says in an unknown way which layers have experts: {key}",
            where=self.name,
            expected="what transformers writes",
            got=shown(self[key], 200),
            cause=f"a family that npu_replay doesn't know yet: {_BY_HAND}",
        )


def _refuse_loops(config: _Keys) -> None:
    """Refuse a model whose config says that a forward runs layers several times."""
    names = config.config if isinstance(config.config, Mapping) else dir(config.config)
    counts = {str(name): config[name] for name in names if _LOOPS.search(str(name)) or "loop" in str(name)}
    for name, inner in [*counts.items()]:  # Inkling-2's own config.json has a loop_config
        counts |= (
            {f"{name}.{name_inside}": inner[name_inside] for name_inside in inner}
            if isinstance(inner, Mapping)
            else {}
        )
    for name, count in counts.items():
        RouterError.unless(
            not (_LOOPS.search(name) and isinstance(count, (int, float)) and count > 1),
            "a looped model runs some layers several times in one forward, and can't be replayed",
            "a model that runs each layer once",
            f"{name}={count}",
            "an engine keeps one row for a token and layer, which is one pass of several",
            config.name,
        )


def _sparse_layers(config: _Keys, num_layers: int) -> list[int]:
    """Return the decoder layers with experts: those that a list names, else those that pass all rules."""
    if config["is_moe"] is False or config["enable_moe_block"] is False:  # Doge, Gemma 4
        return []
    for key, words in _KINDS.items():
        kinds = config.kinds(key, num_layers)
        if key == "layers_block_type" and not {"moe", "mlp"} & set(kinds):
            continue  # in Jamba and Granite it lists kinds of attention
        if key == "mlp_layer_types" and set(kinds) - {"dense", *words}:
            raise config.unknown(key)
        if kinds:
            return [layer for layer in range(num_layers) if kinds[layer] in words]
    for key in ("moe_layers", "moe_layers_enum"):  # Llama 4, Step 3
        named = config.numbers(key)
        if config[key] is not None:
            return [layer for layer in range(num_layers) if layer in named]
    if all(config[key] is None for key in _RULES) and not isinstance(config["moe_layer_freq"], (list, tuple)):
        # It may have dense and sparse layers, and only the family's class knows which is which.
        dense = config["intermediate_size"]
        width = config["moe_intermediate_size"]
        widths = width if isinstance(width, (list, tuple)) else (width,)
        if dense is not None and width is not None and dense not in widths:
            raise ReplayError(
                "the model's config has dense layers, and doesn't say which they are",
                where=config.name,
                expected=f"one of {', '.join((*_KINDS, *_RULES))}",
                got=f"intermediate_size={shown(dense)}, moe_intermediate_size={shown(width)} and none of "
                "them",
                cause=f"{_OF_CLASS}, or {_BY_HAND}",
            )
    return [layer for layer in range(num_layers) if _by_rules(config, layer)]


def _by_rules(config: _Keys, layer: int) -> bool:
    """Return whether a layer has experts by the keys that a family writes; without such keys all have."""
    frequency = config["moe_layer_freq"]
    if isinstance(frequency, (list, tuple)):
        if layer >= len(frequency):
            raise config.unknown("moe_layer_freq")
        if not frequency[layer]:
            return False
    else:
        every = config.whole("expert_layer_period")  # Jamba
        offset = config.whole("expert_layer_offset")
        if layer % (config.whole("moe_layer_freq") or 1) or layer % (every or 1) != (offset or 0):
            return False
    last = config.whole("moe_layer_end_index")
    return (
        all(layer >= (config.whole(key) or 0) for key in _FIRST)
        and (last is None or last < 0 or layer <= last)
        and all((layer + 1) % (config.whole(key) or 1) == 0 for key in _STEP)
        and layer not in config.numbers("mlp_only_layers")
    )


# ---- properties of a config that some engines fail on; a config that can't be read has none


def is_hybrid(model: Any) -> bool:
    """Return whether a config has linear attention, state spaces or convolutions: several KV cache groups."""
    kinds = [str(kind) for key in ("layer_types", "layers_block_type") for kind in _said(model, key) or ()]
    attention = _said(model, "attn_type_list")
    group = _said(model, "layer_group_size")
    linear = _said(model, "linear_attn_config")
    return (
        any(name in kind for kind in kinds for name in ("linear", "mamba", "conv"))
        or isinstance(_said(model, "full_attention_interval"), int)  # Qwen3-Next
        or isinstance(_said(model, "attn_layer_period"), int)  # Jamba
        or isinstance(_said(model, "hybrid_override_pattern"), str)  # Nemotron-H
        or (isinstance(attention, list) and 0 in attention)  # MiniMax-M1
        or (isinstance(group, int) and group > 1)  # Ling and Ring 2.5
        or (isinstance(linear, Mapping) and bool(linear.get("kda_layers")))  # Kimi-Linear
    )


def has_windows(model: Any) -> bool:
    """Return whether a config has layers with a window beside others: two KV cache groups (GPT-OSS)."""
    kinds = [str(kind) for kind in _said(model, "layer_types") or ()]
    has_window = [any(name in kind for name in ("sliding", "chunked")) for kind in kinds]
    return any(has_window) and not all(has_window)


def names_topk(model: Any) -> bool:
    """Return whether a config has num_experts_per_tok, the only key that old vLLM reads, or can't be read."""
    return _said(model, "num_experts_per_tok") is not None or _said(model, "num_hidden_layers") is None


def quantization(model: Any) -> str:
    """Return where a model says that it is quantized; empty if nowhere."""
    if isinstance(model, (str, os.PathLike)) and (Path(model) / _MODELSLIM).is_file():
        return _MODELSLIM
    return "quantization_config" if _said(model, "quantization_config") else ""


def is_there(model: Any) -> bool:
    """Return whether `model` can be read here: it is given, and isn't the name of one on a hub."""
    return model is not None and not (isinstance(model, str) and not Path(model).exists())


def _said(model: Any, key: str) -> Any:
    """Return a key's value, preferring the text model's; None if the config can't be read."""
    try:
        whole = _Keys(_Keys.of_file(Path(model)) if isinstance(model, (str, os.PathLike)) else model, "")
    except ReplayError:
        return None
    inner = next((whole[name] for name in _TEXT if whole[name] is not None), None)
    text = None if inner is None else _said(inner, key)
    return whole[key] if text is None else text
