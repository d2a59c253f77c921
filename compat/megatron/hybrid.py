"""Reads the layer pattern of Megatron-core's HybridModel (MambaModel up to 0.17).

Asks:     attributes of modules and configs, and what refers to a config.
Changes:  nothing.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from npu_replay.errors import ReplayError, RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.parallel.parallel_layout import DecoderLayers, pattern_labels
from npu_replay.routers import Router

_NAMES = ("hybrid_layer_pattern", "hybrid_override_pattern")
_MODELS = ("megatron.core.models.hybrid.hybrid_model", "megatron.core.models.mamba.mamba_model")


def pattern_on(owner: Any) -> str | None:
    """Return the pattern of a module or config; raises for a HybridModel's config without one."""
    found = next((one for name in _NAMES if isinstance(one := getattr(owner, name, None), str)), None)
    if found is None and getattr(owner, "is_hybrid_model", False) is True:
        problem = "the config of a HybridModel doesn't say which layers have experts"
        raise ReplayError(problem, expected="from_megatron(model)", got="a config without a pattern")
    return found


def pattern_of(config: Any) -> str | None:
    """Return the pattern of a config, or of the model built with it; None for any other model's."""
    built: set[str] = set()
    if config is not None and any(name in sys.modules for name in _MODELS):
        # Megatron's config has neither a pattern nor a reference to its model, so its referrers are searched.
        holders = gc.get_referrers(config)
        known = (one if isinstance(one, dict) else getattr(one, "__dict__", {}) for one in holders)
        models = (one for one in known if one.get("config") is config)
        built = {text for one in models for name in _NAMES if isinstance(text := one.get(name), str)}
    problem = "models with several patterns have this config"
    ReplayError.unless(len(built) < 2, problem, "from_megatron(model)", sorted(built))
    return built.pop() if built else pattern_on(config)


def pattern_in(chunks: Sequence[ModuleTree]) -> str | None:
    """Return the pattern of the whole model that these are chunks of; None for any other model."""
    return next((pattern for chunk in chunks for _, _, pattern in _stacks(chunk)), None)


def labelled(chunk: ModuleTree, routers: list[Router]) -> list[Router]:
    for path, _, pattern in _stacks(chunk):
        labels = pattern_labels(pattern)
        moe = DecoderLayers.of_pattern(pattern).moe
        problem = "the number of this router isn't that of an E in the pattern of the model"
        cause = "a pipeline split that Megatron's layers and the pattern count differently"
        for at, one in enumerate(routers):
            if not path or one.path.startswith(f"{path}."):
                place = -1 if one.layer is None else one.layer
                label = labels[place] if 0 <= place < len(labels) else None
                expected = f"an E in {pattern!r}"
                got = f"layer_number {place + 1}"
                RouterError.unless(label in moe, problem, expected, got, cause, one.path)
                routers[at] = replace(one, layer=label, whole=moe)
    return routers


def layers_in(chunks: Sequence[ModuleTree]) -> set[int] | None:
    """Return the decoder layers in these chunks of a HybridModel; None for any other model."""
    found = [(stack, pattern_labels(text)) for chunk in chunks for _, stack, text in _stacks(chunk)]
    labels = (labels[layer.layer_number - 1] for stack, labels in found for layer in stack.layers)
    return {label for label in labels if label is not None} if found else None


def _stacks(chunk: ModuleTree) -> Iterator[tuple[str, Any, str]]:
    """Yield the decoder of a HybridModel in a chunk: path, module, and the pattern of the whole model."""
    patterns = (pattern_on(model) for _, _, model in chunk.where(_may_have_pattern))
    pattern = next(filter(None, patterns), None)
    for _, path, module in chunk.where(_is_stack):
        stack: Any = module
        if getattr(stack, "is_mtp_layer", False):
            continue
        pp, vp = (getattr(stack.config, f"{kind}pipeline_model_parallel_size") for kind in ("", "virtual_"))
        symbols = "".join(stack.layer_type_list)
        problem = "the pattern of the whole model isn't known"
        got = f"a stage's decoder, {symbols!r}"
        cause = "model.decoder in the place of model"
        RouterError.unless(bool(pattern) or pp * (vp or 1) == 1, problem, "the HybridModel", got, cause, path)
        yield path, stack, pattern or symbols


def _may_have_pattern(module: nn.Module, path: str) -> bool:
    return any(hasattr(module, name) for name in (*_NAMES, "is_hybrid_model"))


def _is_stack(module: nn.Module, path: str) -> bool:
    return {"layer_type_list", "pp_group"} <= vars(module).keys()
