"""Describes MindSpeed-LLM's own routing inside Megatron's TopKRouter, and its layers without a router.

All its routing types but one end in one top-k over the experts, which the seam answers as it does Megatron's;
where none comes, as in sparsemixer_topk, the block's first micro-batch is an error.

Asks:     the module that a router's `routing` comes from, its routing type, the arguments on configs.
Changes:  nothing, and nothing is imported.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from npu_replay.parallel.parallel_layout import DecoderLayers

_NOOP = "mindspeed.core.pipeline_parallel.noop_layers.adaptor"


def routes(module: nn.Module) -> bool:
    """Return whether a router chooses by MindSpeed-LLM's `routing`, also inside wrappers."""
    function: Any = getattr(type(module), "routing", None)
    while function is not None:
        if str(getattr(function, "__module__", "")).split(".")[0] == "mindspeed_llm":
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def looks_up(module: nn.Module) -> bool:
    """Return whether a router looks its experts up by the token (a hash layer), alike in every pass."""
    return (
        routes(module)
        and bool(getattr(module, "hash", False))
        and getattr(module, "tid2eid", None) is not None
        and getattr(module, "expert_bias", None) is None
        and _looks_up(module.config, _routing_type(module))
    )


def layer_kinds(config: Any) -> int | Sequence[int]:
    """Return moe_layer_freq as Megatron means it: n for each n-th layer, or 1 (a router) and 0 by layer.

    MindSpeed-LLM makes the first `first_k_dense_replace` layers dense, and of the others those whose number,
    counted from the first layer of all, isn't a multiple of `moe_layer_freq`. `noop_layers` only have a
    number, and hash layers nothing to choose.
    """
    every: Any = getattr(config, "moe_layer_freq", 1) or 1  # None by default in MindSpeed-LLM 2.3.0
    dense = 0 if isinstance(every, Iterable) else int(getattr(config, "first_k_dense_replace", None) or 0)
    without = set(noop_layers(config))
    if _looks_up(config, getattr(config, "moe_router_load_balancing_type", None)):
        without |= set(range(int(config.n_hash_layers)))
    if dense <= 0 and not without:
        return every  # type: ignore[no-any-return]
    decoder = DecoderLayers(int(config.num_layers), moe_layer_freq=every)
    moe = {layer for layer in decoder.moe if layer >= dense and layer not in without}
    return [int(layer in moe) for layer in range(decoder.count)]


def noop_layers(config: Any) -> frozenset[int]:
    """Return the decoder layers that pass on their input, 0-based; MindSpeed balances a pipeline by them.

    >>> import types
    >>> from npu_replay.compat.mindspeed import llm
    >>> sorted(llm.noop_layers(types.SimpleNamespace(noop_layers="0,3")))
    [0, 3]
    """
    return frozenset(_numbers(getattr(config, "noop_layers", None)))


def pipeline_table(config: Any) -> list[list[int]] | None:
    """Return the layers of each stage by `num_layer_list`, [pipeline rank][0]; None without it."""
    counts = _numbers(getattr(config, "num_layer_list", None))
    return [[count] for count in counts] or None


def is_noop(module: nn.Module) -> bool:
    """Return whether a module is one of `noop_layers`: it has a layer_number, but is no TransformerLayer."""
    product: Any = sys.modules.get(_NOOP)
    kind = getattr(product, "NoopTransformerLayer", None)
    return kind is not None and isinstance(module, kind)


def _routing_type(module: nn.Module) -> Any:
    config: Any = module.config
    return getattr(module, "routing_type", config.moe_router_load_balancing_type)


def _looks_up(config: Any, kind: Any) -> bool:
    return bool(
        (getattr(config, "n_hash_layers", 0) or 0) >= 1
        and kind == "none"
        and config.moe_router_score_function == "sqrtsoftplus"
    )


def _numbers(value: Any) -> list[int]:
    """Parse MindSpeed's list of numbers: `3,7` before its arguments were checked, a set or list after."""
    if value is None:
        return []
    parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    return [int(part) for part in parts] if isinstance(parts, Iterable) else [int(parts)]
