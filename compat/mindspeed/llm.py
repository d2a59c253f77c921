"""MindSpeed-LLM: its own routing inside Megatron's TopKRouter, and the layers that it gives no router.

What it probes: the module that the router's `routing` comes from, so nothing is imported, and a MindSpeed-LLM
that is only installed changes nothing; then the router's routing type, and the arguments that its configs
carry.

What it offers: `refuse` says why a router can't be replayed, `looks_up` which one chooses by a table of
tokens, `layer_kinds` which decoder layers have a router, `pipeline_table` which stage has them. It changes
nothing.

All its routing types but one end in one top-k over the experts, which the seam answers as it does Megatron's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from npu_replay.errors import ReplayError, RouterError
from npu_replay.parallel.pipeline_layers import DecoderLayers

_NOOP = "mindspeed.core.pipeline_parallel.noop_layers.adaptor"


def routes(module: nn.Module) -> bool:
    """Does this router choose by MindSpeed-LLM's `routing`, whoever wrapped it since?"""
    function: Any = getattr(type(module), "routing", None)
    while function is not None:
        if str(getattr(function, "__module__", "")).split(".")[0] == "mindspeed_llm":
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def refuse(module: nn.Module, path: str) -> None:
    """Refuse a router of a routing type whose choice can't be given to it.

    One that nobody knows isn't refused: the session sees whether its top-k was reached and what it shows.

    Raises:
        RouterError: names the routing type, the reason and what to do.
    """
    if not routes(module):
        return
    config: Any = module.config
    kind = _routing_type(module)
    groups: Any = getattr(module, "n_group", None) or getattr(config, "moe_router_num_groups", None)
    if kind == "sparsemixer_topk":
        expected, got = "a routing type with a top-k, or this one without a replay", "two arg-max with noise"
        cause = "the type draws its experts one after the other, and there is no top-k that could be answered"
    elif kind == "pai_megatron_aux_loss" and _hands_out_a_handle(config):
        expected, got = "moe_permutation_async_comm=False", "moe_permutation_async_comm=True"
        cause = "with the allgather dispatcher the router then returns a map that is still under way"
    elif (
        kind == "group_limited_greedy"
        and groups == module.num_experts
        and config.moe_router_group_topk == module.topk
    ):
        expected = "fewer groups than experts, or another moe_router_group_topk than moe_router_topk"
        got = f"{config.num_moe_experts} groups and experts, {config.moe_router_group_topk} of each"
        cause = "the top-k over the groups can't be told from the one over the experts"
    else:
        return
    raise RouterError(
        f"MindSpeed-LLM's moe_router_load_balancing_type={kind!r} can't be replayed",
        where=path,
        expected=expected,
        got=got,
        cause=cause,
    )


def looks_up(module: nn.Module) -> bool:
    """Does this router look its experts up by the token (a hash layer)? Every pass has the same tokens and so
    the same experts: there is nothing to record, and no top-k that could be answered."""
    return (
        routes(module)
        and bool(getattr(module, "hash", False))
        and getattr(module, "tid2eid", None) is not None
        and getattr(module, "expert_bias", None) is None
        and _looks_up(module.config, _routing_type(module))
    )


def layer_kinds(config: Any) -> int | Sequence[int]:
    """moe_layer_freq as Megatron means it: n for each n-th layer, or 1 (a router) and 0 for all layers.

    MindSpeed-LLM makes the first `first_k_dense_replace` layers dense, and of the others those whose number,
    counted from the first layer of all, isn't a multiple of `moe_layer_freq`. `noop_layers` only have a
    number, and hash layers nothing to choose.

    Raises:
        ReplayError: numbers that can't be read.
    """
    every: Any = getattr(config, "moe_layer_freq", 1) or 1  # None is what MindSpeed-LLM 2.3.0 begins with
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
    """The decoder layers that only pass on what they get, 0-based: MindSpeed's, to even out a pipeline.

    >>> import types
    >>> from npu_replay.compat.mindspeed import llm
    >>> sorted(llm.noop_layers(types.SimpleNamespace(noop_layers="0,3")))
    [0, 3]
    """
    return frozenset(_numbers(getattr(config, "noop_layers", None), "noop_layers"))


def pipeline_table(config: Any) -> list[list[int]] | None:
    """Layers of each stage by `num_layer_list`, [pipeline rank][0], for DecoderLayers; None without it."""
    counts = _numbers(getattr(config, "num_layer_list", None), "num_layer_list")
    return [[count] for count in counts] or None


def is_noop(module: nn.Module) -> bool:
    """Is this one of `noop_layers`? It has a layer_number, but is no TransformerLayer."""
    product: Any = sys.modules.get(_NOOP)
    kind = getattr(product, "NoopTransformerLayer", None)
    return kind is not None and isinstance(module, kind)


def _routing_type(module: nn.Module) -> Any:
    config: Any = module.config
    return getattr(module, "routing_type", config.moe_router_load_balancing_type)


def _hands_out_a_handle(config: Any) -> bool:
    return bool(
        config.moe_token_dispatcher_type == "allgather"
        and getattr(config, "moe_permutation_async_comm", False)
        and (config.sequence_parallel or config.expert_model_parallel_size > 1)
    )


def _looks_up(config: Any, kind: Any) -> bool:
    return bool(
        (getattr(config, "n_hash_layers", 0) or 0) >= 1
        and kind == "none"
        and config.moe_router_score_function == "sqrtsoftplus"
    )


def _numbers(given: Any, name: str) -> list[int]:
    """A list of numbers as MindSpeed has it: `3,7` before its arguments were checked, a set or list after."""
    if given is None:
        return []
    parts = [part for part in given.split(",") if part.strip()] if isinstance(given, str) else given
    try:
        return [int(part) for part in parts] if isinstance(parts, Iterable) else [int(parts)]
    except (TypeError, ValueError) as error:
        raise ReplayError(
            f"{name} can't be read", expected="numbers, or a string like '3,7'", got=repr(given)
        ) from error
