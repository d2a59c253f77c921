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
    pattern = next(
        (pattern for name in _NAMES if isinstance(pattern := getattr(owner, name, None), str)), None
    )
    if pattern is None and getattr(owner, "is_hybrid_model", False) is True:
        raise ReplayError(
            "the config of a HybridModel doesn't say which layers have experts",
            expected="from_megatron(model)",
            got="a config without a pattern",
        )
    return pattern


def pattern_of(config: Any) -> str | None:
    """Return the pattern of a config, or of the model built with it; None for any other model's."""
    built: set[str] = set()
    if config is not None and any(name in sys.modules for name in _MODELS):
        # This is a hack: Megatron's config has neither a pattern nor a reference to its model, so its
        # referrers are searched.
        holders = gc.get_referrers(config)
        namespaces = (
            holder if isinstance(holder, dict) else getattr(holder, "__dict__", {}) for holder in holders
        )
        models = (fields for fields in namespaces if fields.get("config") is config)
        built = {text for fields in models for name in _NAMES if isinstance(text := fields.get(name), str)}
    ReplayError.unless(
        len(built) < 2,
        "models with several patterns have this config",
        expected="from_megatron(model)",
        got=sorted(built),
    )
    return built.pop() if built else pattern_on(config)


def pattern_in(chunks: Sequence[ModuleTree]) -> str | None:
    """Return the pattern of the whole model that these are chunks of; None for any other model."""
    return next((pattern for chunk in chunks for _, _, pattern in _stacks(chunk)), None)


def labelled(chunk: ModuleTree, routers: list[Router]) -> list[Router]:
    for path, _, pattern in _stacks(chunk):
        labels = pattern_labels(pattern)
        moe = DecoderLayers.of_pattern(pattern).moe
        for at, router in enumerate(routers):
            if not path or router.path.startswith(f"{path}."):
                place = -1 if router.layer is None else router.layer
                label = labels[place] if 0 <= place < len(labels) else None
                if label not in moe:
                    raise RouterError(
                        "the number of this router isn't that of an E in the pattern of the model",
                        where=router.path,
                        expected=f"an E in {pattern!r}",
                        got=f"layer_number {place + 1}",
                        cause="a pipeline split that Megatron's layers and the pattern count differently",
                    )
                routers[at] = replace(router, layer=label, whole=moe)
    return routers


def layers_in(chunks: Sequence[ModuleTree]) -> set[int] | None:
    """Return the decoder layers in these chunks of a HybridModel; None for any other model."""
    stacks = [(stack, pattern_labels(text)) for chunk in chunks for _, stack, text in _stacks(chunk)]
    labels = (labels[layer.layer_number - 1] for stack, labels in stacks for layer in stack.layers)
    return {label for label in labels if label is not None} if stacks else None


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
        if not pattern and pp * (vp or 1) != 1:
            raise RouterError(
                "the pattern of the whole model isn't known",
                where=path,
                expected="the HybridModel",
                got=f"a stage's decoder, {symbols!r}",
                cause="model.decoder in the place of model",
            )
        yield path, stack, pattern or symbols


def _may_have_pattern(module: nn.Module, path: str) -> bool:
    return any(hasattr(module, name) for name in (*_NAMES, "is_hybrid_model"))


def _is_stack(module: nn.Module, path: str) -> bool:
    return {"layer_type_list", "pp_group"} <= vars(module).keys()
