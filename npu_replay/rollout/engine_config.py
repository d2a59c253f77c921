"""What a rollout engine stumbles over in a model's config, besides which of its layers route.

A config that can't be read says nothing here: `RoutedModel` says what is wrong with it.

Probes: `is_hybrid`, `names_topk`, `quantization`. Nothing to undo.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_replay import json_text
from npu_replay.rollout.model_config import RoutedModel

_MODELSLIM = "quant_model_description.json"


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
    if model is None or isinstance(model, RoutedModel):
        return {}
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        try:
            file = path / "config.json" if path.is_dir() else path
            model = json_text.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
    elif not isinstance(model, Mapping):
        to_dict = getattr(model, "to_dict", None)
        model = to_dict() if callable(to_dict) else getattr(model, "__dict__", {})
    if not isinstance(model, Mapping):
        return {}
    text = model.get("text_config")
    return model if text is None else {**model, **_contents(text)}
