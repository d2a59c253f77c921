"""RoutedModel: which layers of a model route, and over how many experts; read from its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from npu_replay.errors import ReplayError, listed, shown, whole_number
from npu_replay.rollout.config_keys import BY_HAND, EXPERTS, Keys, refuse_loops
from npu_replay.routers import Router, check_alike
from npu_replay.routes.checks import MAX_EXPERTS, MAX_LAYERS

_TOPK = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    *("experts_per_token", "moe_router_topk", "num_selected_experts"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_KINDS: dict[str, tuple[str, ...]] = {
    "block_configs": ("moe",),  # Nemotron Puzzle
    "mlp_layer_types": ("sparse", "moe", "hash_moe"),
    "layers_block_type": ("moe",),  # Nemotron-H
    "hybrid_override_pattern": ("E",),  # Nemotron-H's own config.json
}
"""Lists of what each layer is, and the words in them for a layer with experts."""
_FIRST = (
    "first_k_dense_replace",
    "moe_first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",  # Ernie 4.5
    "dense_mlp_idx",  # Inkling
)
_STEP = (
    "decoder_sparse_step",  # Qwen
    "interleave_moe_layer_step",  # Llama 4
    "moe_layer_interval",  # Ernie 4.5
    "moe_layer_frequency",  # Arctic
)
_RULES = (
    *_FIRST,
    *_STEP,
    "expert_layer_period",  # Jamba
    "mlp_only_layers",  # Qwen
    "enable_moe_block",  # Gemma 4
)
_MODELSLIM = "quant_model_description.json"


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """What has to be known of a model to read a rollout engine's array of its routes.

    Attributes:
        layers: the decoder layers with a router, global and 0-based, ascending.
        num_layers: decoder layers in all, dense ones included.
        num_experts: routed experts of a layer.
        topk: experts a token in a layer.
        hashed: the decoder layers that look their experts up by token id (DeepSeek-V4): an engine reports
            them, every pass chooses the same, and nothing is replayed there.

    Raises:
        ReplayError: the numbers don't go together.
    """

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    topk: int
    hashed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "topk"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, "RoutedModel"))
        for name in ("layers", "hashed"):
            given = listed(getattr(self, name), name, "RoutedModel", most=MAX_LAYERS)
            whole = (whole_number(one, f"each entry of {name}", "RoutedModel") for one in given)
            object.__setattr__(self, name, tuple(whole))
        _check_most(self.num_layers, MAX_LAYERS, "decoder layers", "RoutedModel")
        _check_most(self.num_experts, MAX_EXPERTS, "experts in a layer", "RoutedModel")
        layers, every = self.layers, [*self.layers, *self.hashed]
        if (
            not layers
            or list(layers) != sorted(layers)
            or len(set(every)) != len(every)
            or not 0 <= min(every) <= max(every) < self.num_layers
        ):
            raise ReplayError(
                "these can't be the MoE layers of a model",
                where="RoutedModel",
                expected=f"ascending 0-based decoder layers below {self.num_layers}, one at least",
                got=shown(layers, 200) + (f", hashed {shown(self.hashed, 200)}" if self.hashed else ""),
                cause="a model without experts, or 1-based numbers (Megatron's layer_number)",
            )
        if not 1 <= self.topk <= self.num_experts:
            most = f"1 to {self.num_experts} experts a token"
            raise ReplayError("bad top-k", where="RoutedModel", expected=most, got=self.topk)

    @property
    def dense(self) -> tuple[int, ...]:
        """The decoder layers without experts."""
        return tuple(sorted({*range(self.num_layers)} - {*self.layers, *self.hashed}))

    @property
    def sparse(self) -> tuple[int, ...]:
        """The decoder layers with experts, `layers` and `hashed`, ascending."""
        return tuple(sorted((*self.layers, *self.hashed)))

    def routed_columns(self, columns: int) -> slice | list[int] | None:
        """Return where `layers` are among an engine's columns: all decoder layers, or those with experts;
        None where it has another number of them. Neighbours are a slice, and so aren't copied."""
        labels = range(self.num_layers) if columns == self.num_layers else self.sparse
        if len(labels) != columns:
            return None
        wanted = [labels.index(layer) for layer in self.layers]
        return slice(wanted[0], wanted[-1] + 1) if wanted[-1] - wanted[0] == len(wanted) - 1 else wanted

    @classmethod
    def of_module(cls, module: nn.Module, routers: Sequence[Router]) -> RoutedModel:
        """A model of transformers, by the routers that were found in it.

        Args:
            module: the model, or a wrapper of it (PEFT's, DDP).

        Raises:
            ReplayError: nothing in it has a config, its routers differ, or it is a looped model.
        """
        configs = (getattr(inner, "config", None) for inner in module.modules())
        config: Any = next((one for one in configs if hasattr(one, "get_text_config")), None)
        if config is None:
            got = f"{type(module).__name__}, without a config"
            raise ReplayError(
                "the number of decoder layers isn't known", expected="a model of transformers", got=got
            )
        check_alike({f"layer {one.label}": (one.topk, one.num_experts) for one in routers})
        refuse_loops(Keys.of(config))
        return cls(
            layers=tuple(router.label for router in routers),
            num_layers=int(config.get_text_config().num_hidden_layers),
            num_experts=routers[0].num_experts,
            topk=routers[0].topk,
        )

    @classmethod
    def of(cls, model: Any) -> RoutedModel:
        """`model` as it is if it is one, else what its config says: see `from_config`."""
        return model if isinstance(model, RoutedModel) else cls.from_config(model)

    @classmethod
    def from_config(cls, config: Any) -> RoutedModel:
        """Read a Hugging Face config.

        >>> mixtral = {"num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2}
        >>> npu_replay.RoutedModel.from_config(mixtral)
        RoutedModel(layers=(0, 1, 2), num_layers=3, num_experts=8, topk=2, hashed=())

        Args:
            config: its path or its folder's, its contents, an object with these attributes (transformers'
                PretrainedConfig), or a model that has one as `.config`. A model of several kinds of input may
                keep its language model's under `text_config`.

        Raises:
            ReplayError: a key is missing that no other stands for; names those that were looked for.
            RouterError: layers differ in top-k or experts, or run several times in one forward.
        """
        found = Keys.of(config)
        refuse_loops(found)
        blocks = found["block_configs"] or found["layers_block_type"]  # Nemotron-H saves no other number
        counted = isinstance(blocks, (list, tuple)) and found["num_hidden_layers"] is None
        num_layers = len(blocks) if counted else found.number(_LAYERS, "the number of decoder layers")
        _check_most(num_layers, MAX_LAYERS, "decoder layers", found.name)  # each is looked at below
        # LongCat has ids above those of the routed experts, and counts two layers as one.
        if found.whole("zero_expert_num"):
            raise ReplayError(
                "a model with zero experts can't be read from its config",
                where=found.name,
                expected="routed experts only",
                got=f"zero_expert_num={shown(found['zero_expert_num'])}",
                cause=f"a family that counts layers and experts in its own way: {BY_HAND}",
            )
        own = found.by_layer()
        without = {layer for layer, one in own.items() if 0 in map(one.__getitem__, EXPERTS)}
        sparse = [layer for layer in _sparse_layers(found, num_layers) if layer not in without]
        # DeepSeek-V4 looks the experts of some layers up by token id.
        kinds, first = found.kinds("mlp_layer_types", num_layers), found.whole("num_hash_layers") or 0
        hashed = tuple(one for one in sparse if (kinds[one] == "hash_moe" if kinds else one < first))
        numbers = {}
        for layer in sparse or [0]:
            config = own.get(layer, found)
            experts = config.number(EXPERTS, "the number of routed experts", layer)
            topk = config.number(_TOPK, "the experts a token", layer)
            numbers[f"{config.name}, layer {layer}"] = topk, experts
        check_alike(numbers)
        layers = tuple(layer for layer in sparse if layer not in hashed)
        return cls(layers=layers, num_layers=num_layers, num_experts=experts, topk=topk, hashed=hashed)


def _check_most(given: int, most: int, what: str, where: str) -> None:
    ReplayError.unless(given <= most, f"no model has so many {what}", f"at most {most}", given, where=where)


def _sparse_layers(config: Keys, num_layers: int) -> list[int]:
    """The decoder layers with experts: a list of the config's says it, or else rules, of which all hold."""
    if config["is_moe"] is False or config["enable_moe_block"] is False:  # Doge, Gemma 4
        return []
    for key, words in _KINDS.items():
        kinds = config.kinds(key, num_layers)
        if key == "layers_block_type" and not {"moe", "mlp"} & set(kinds):
            continue  # elsewhere it says what attention each layer has (Jamba, Granite)
        if key == "mlp_layer_types" and set(kinds) - {"dense", *words}:
            raise config.unknown(key)
        if kinds:
            return [layer for layer in range(num_layers) if kinds[layer] in words]
    for key in ("moe_layers", "moe_layers_enum"):  # Llama 4, Step 3
        named = config.numbers(key)
        if config[key] is not None:
            return [layer for layer in range(num_layers) if layer in named]
    if all(config[key] is None for key in _RULES) and not isinstance(config["moe_layer_freq"], (list, tuple)):
        # Dense layers and sparse ones: which is which is only in the family's class in transformers.
        dense, width = config["intermediate_size"], config["moe_intermediate_size"]
        widths = width if isinstance(width, (list, tuple)) else (width,)
        if dense is not None and width is not None and dense not in widths:
            raise ReplayError(
                "the model's config has dense layers, and doesn't say which they are",
                where=config.name,
                expected=f"one of {', '.join((*_KINDS, *_RULES))}",
                got=f"intermediate_size={shown(dense)}, moe_intermediate_size={shown(width)} and none of "
                "them",
                cause="a config.json that leaves it to the family's class: give transformers' config of the "
                f"model (AutoConfig.from_pretrained), or {BY_HAND}",
            )
    return [layer for layer in range(num_layers) if _by_rules(config, layer)]


def _by_rules(config: Keys, layer: int) -> bool:
    """Has this decoder layer experts? A family writes some of these keys; with none of them, all have."""
    frequency = config["moe_layer_freq"]
    if isinstance(frequency, (list, tuple)):
        if layer >= len(frequency):
            raise config.unknown("moe_layer_freq")
        if not frequency[layer]:
            return False
    else:
        every, offset = config.whole("expert_layer_period"), config.whole("expert_layer_offset")  # Jamba
        if layer % (config.whole("moe_layer_freq") or 1) or layer % (every or 1) != (offset or 0):
            return False
    last = config.whole("moe_layer_end_index")
    return (
        all(layer >= (config.whole(key) or 0) for key in _FIRST)
        and (last is None or last < 0 or layer <= last)
        and all((layer + 1) % (config.whole(key) or 1) == 0 for key in _STEP)
        and layer not in config.numbers("mlp_only_layers")
    )


# ---- what engines stumble over in a config besides; one that can't be read says nothing here


def is_hybrid(model: Any) -> bool:
    """Has a model linear attention or state spaces in some layers, and so several KV cache groups?

    Args:
        model: a Hugging Face config: its path or its folder's, its contents, an object. A RoutedModel doesn't
            say.
    """
    config = _contents(model)
    kinds = [str(kind) for key in ("layer_types", "layers_block_type") for kind in config.get(key) or ()]
    return (
        any("linear" in kind or "mamba" in kind for kind in kinds)
        or isinstance(config.get("full_attention_interval"), int)  # Qwen3-Next
        or isinstance(config.get("attn_layer_period"), int)  # Jamba
        or isinstance(config.get("hybrid_override_pattern"), str)  # Nemotron-H
    )


def names_topk(model: Any) -> bool:
    """Has it num_experts_per_tok, the only key that vLLM looked for at first? True where nothing is known."""
    config = _contents(model)
    return not config or config.get("num_experts_per_tok") is not None


def quantization(model: Any) -> str:
    """Where a model says that it is quantized; empty if nowhere."""
    if isinstance(model, (str, os.PathLike)) and (Path(model) / _MODELSLIM).is_file():
        return _MODELSLIM
    return "quantization_config" if _contents(model).get("quantization_config") else ""


def is_there(model: Any) -> bool:
    """Can `model` be asked? Not where none is given, or where it is the name of one on a hub."""
    return model is not None and not (isinstance(model, str) and not Path(model).exists())


def _contents(model: Any) -> Mapping[str, Any]:
    """The config as a mapping, the text model's own keys over the rest; empty where there is none."""
    if isinstance(model, (str, os.PathLike)):
        try:
            model = Keys.of_file(Path(model))
        except ReplayError:
            return {}
    elif not isinstance(model, (Mapping, RoutedModel)):
        to_dict = getattr(model, "to_dict", None)
        model = to_dict() if callable(to_dict) else getattr(model, "__dict__", {})
    if not isinstance(model, Mapping):
        return {}
    text = model.get("text_config")
    return model if text is None else {**model, **_contents(text)}
