"""Adds functions of later Megatron-core releases that frameworks import, each where the release lacks it.

    topk_routing_with_score_function      new in 0.14; without router_replay before 0.16 (dense_output: 0.17)
    apply_router_token_dropping           before 0.14 a part of topk_softmax_with_capacity
    compute_routing_scores_for_aux_loss   before 0.14 a method of TopKRouter, another one in 0.12 and 0.13
    is_vp_first_stage, is_vp_last_stage   new in 0.14, and their module in 0.13

Asks:     each name by itself, and the arguments that the release's function takes.
Changes:  names in `moe_utils` and `pipeline_parallel.utils`, also where others hold them. Ours call the
          release's own, looked up each time, so what MindSpeed puts in their place counts.
Undone:   the names are put back, or taken away, wherever they still are ours.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch

from npu_replay.compat.megatron_backports.router_replay import Asked, asked, is_idle
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Change, Patches
from npu_replay.errors import NoEffect, ReplayError

MODULE = "megatron.core.transformer.moe.moe_utils"
STAGES = "megatron.core.pipeline_parallel.utils"

_WHAT = "functions of later Megatron-core releases"
_TOPK = "topk_routing_with_score_function"
_ADDED = "a later release's, over this one's own"
_TINY = 1e-20
"""Is added to the sum of a row before dividing by it, as Megatron does."""

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Two tensors [rows, experts]: probabilities (or scores) and a bool map of the chosen experts."""


class NoFusedRouter(ReplayError, ValueError):
    """Raised when the fused router is absent or lacks a feature; a ValueError, as in later releases."""


def install() -> None:
    import_hook.when_imported(MODULE, f"{_WHAT}: routing", _add_routing)
    import_hook.when_imported(STAGES, f"{_WHAT}: virtual stages", _add_stages)
    import_hook.serve(STAGES, _fill_stages, "is_vp_first_stage and is_vp_last_stage", reason=_WHAT)


# Adding


def _add_routing(module: Any) -> None:
    native = getattr(module, _TOPK, None)
    known = {} if native is None else inspect.signature(native).parameters
    if native is None:
        if not hasattr(module, "topk_softmax_with_capacity"):
            raise ReplayError(
                "no function that routes is known",
                where=module.__name__,
                expected=f"{_TOPK} or topk_softmax_with_capacity",
                got="neither",
                cause="a fork of Megatron-core, or a release that npu_replay hasn't seen",
            )
        ours = _with_replay(functools.partial(_without_capacity, module))
        _patches.set(module, _TOPK, ours, _ADDED)
    elif "router_replay" not in known and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        _put_everywhere(module, _TOPK, native, _with_replay(native), "takes router_replay")
    _add(module, apply_router_token_dropping, compute_routing_scores_for_aux_loss)


def _add_stages(module: Any) -> None:
    _add(module, is_vp_first_stage, is_vp_last_stage)


def _fill_stages(module: Any) -> None:
    vars(module).update(is_vp_first_stage=is_vp_first_stage, is_vp_last_stage=is_vp_last_stage)


def _add(module: Any, *functions: Callable[..., Any]) -> None:
    for function in functions:
        if not hasattr(module, function.__name__):
            _patches.set(module, function.__name__, function, _ADDED)


def _put_everywhere(module: Any, name: str, native: Any, ours: Any, why: str) -> None:
    """Replace a function in every module that holds it: MindSpeed replaces those that hold the same one."""

    def undo() -> bool:
        held = vars(module).get(name) is ours
        _rebind(name, ours, native)
        return held

    _rebind(name, native, ours)
    _patches.add(Change(f"{module.__name__}.{name}", why, undo))


def _rebind(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = object.__getattribute__(module, "__dict__")  # not by getattr, which loads a lazy module
            if names.get(name) is old:
                names[name] = new


# Routing


def _with_replay(native: Callable[..., Pair]) -> Callable[..., Pair]:

    def topk_routing_with_score_function(
        logits: torch.Tensor,
        topk: int,
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        score_function: str = "softmax",
        expert_bias: torch.Tensor | None = None,
        fused: bool = False,
        router_replay: Any = None,
        dense_output: bool = False,
    ) -> Pair:
        """Choose each row's `topk` experts of logits [rows, experts], or take them from `router_replay`.

        The arguments are those of Megatron 0.19. A replay doesn't use the fused kernel.

        Returns:
            The probabilities in the logits' dtype, and the map, bool; both [rows, experts]. With
            `dense_output` the probabilities and the ids, int64, in the order of the top-k; both [rows, topk].
        """
        if dense_output and fused:
            raise NoFusedRouter(
                "the fused router has no dense output",
                where=_TOPK,
                expected="fused=False, or dense_output=False",
                got="both on",
                cause="its kernel returns a map, without an order of the experts; upstream returns that map",
            )
        how = {
            "use_pre_softmax": use_pre_softmax,
            "num_groups": num_groups,
            "group_topk": group_topk,
            "scaling_factor": scaling_factor,
            "score_function": score_function,
            "expert_bias": expert_bias,
            "fused": fused,
        }
        if is_idle(router_replay):
            if not dense_output:
                return native(logits, topk, **how)
            router_replay = SimpleNamespace(get_replay_topk=_own_topk)  # only to learn the ids of the top-k
        rows, num_experts = logits.shape[0], logits.shape[-1]
        call = Asked(router_replay, rows, num_experts, topk, groups=(num_groups, group_topk))
        with asked(call, fused=fused):
            probs, routing_map = native(logits, topk, **how)
        if not dense_output:
            return probs, routing_map
        if call.ids is None:
            raise NoEffect(
                "this release's routing calls no top-k, so there is no order for a dense output",
                where=_TOPK,
                expected=f"a top-{call.topk} over {call.num_experts} experts",
                got=", ".join(dict.fromkeys(call.seen)) or "nothing",
                cause="another function in the place of Megatron's, such as MindSpeed's fix_router",
            )
        return probs.gather(1, call.ids), call.ids

    return topk_routing_with_score_function


def _own_topk(scores: Any, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any) -> Any:
    return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)


def _without_capacity(module: Any, logits: torch.Tensor, topk: int, *, fused: bool, **how: Any) -> Pair:
    if fused:
        _refuse_fused(_TOPK)
    probs, routing_map, _ = module.topk_softmax_with_capacity(logits, topk, **how)
    return probs, routing_map


def apply_router_token_dropping(
    routing_probs: torch.Tensor,
    routing_map: torch.Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> Pair:
    """Limit each expert to the rows of its capacity, in probabilities and map, [rows, experts] each.

    Drops the least probable rows («probs») or the last ones («position»); `pad_to_capacity` fills up
    each expert with rows that didn't choose it, at probability 0.
    """
    rows, num_experts = routing_probs.shape
    capacity = sys.modules[MODULE].get_capacity(rows * router_topk, num_experts, capacity_factor)
    ranked = {"probs": routing_probs, "position": routing_map.int()}.get(drop_policy)
    if ranked is None:
        raise ValueError(f"Invalid drop_policy: {drop_policy}")
    kept = torch.ones_like(routing_map, dtype=torch.bool)
    if capacity <= rows:
        # sorted=False as in Megatron: ties have to be broken alike.
        places = torch.topk(ranked, k=capacity, dim=0, sorted=False)[1]
        kept = torch.zeros_like(kept).scatter(0, places, True)
    if not pad_to_capacity:
        kept = kept & routing_map
    return routing_probs * kept, kept


def compute_routing_scores_for_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str, fused: bool = False
) -> Pair:
    """Return what the auxiliary losses count: the live choice, without bias, groups or replay.

    >>> from npu_replay.compat.megatron_backports.moe_utils import compute_routing_scores_for_aux_loss
    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> compute_routing_scores_for_aux_loss(logits, 2, "softmax")
    (tensor([[False,  True,  True]]), tensor([[0.0900, 0.6652, 0.2447]]))

    Returns:
        The map, bool, and the scores, each row's sum 1 (float32 for a softmax; the logits' dtype for a
        sigmoid, as in 0.14 to 0.16; later releases go to float32 first); both [rows, experts].
    """
    if fused:
        _refuse_fused("compute_routing_scores_for_aux_loss")
    if score_function == "softmax":
        scores = logits.softmax(dim=-1, dtype=torch.float32)
    elif score_function == "sigmoid":
        scores = logits.sigmoid()
        scores = scores / (scores.sum(dim=-1, keepdim=True) + _TINY)
    else:
        raise ValueError(f"Invalid score_function: {score_function}")
    chosen = torch.topk(scores, k=topk, dim=1)[1]
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True), scores


def _refuse_fused(name: str) -> None:
    raise NoFusedRouter(
        "the fused router isn't there",
        where=name,
        expected="fused=False",
        got="fused=True",
        cause="moe_router_fusion=True with Megatron-core 0.12 or 0.13, which call no kernel of "
        "Transformer Engine's; it came with 0.14",
    )


# Virtual pipeline stages


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether this is the first of a rank's `vp_size` model chunks; a single chunk is.

    >>> from npu_replay.compat.megatron_backports.moe_utils import is_vp_first_stage, is_vp_last_stage
    >>> is_vp_first_stage(1, 2), is_vp_last_stage(1, 2)
    (False, True)
    """
    return _place(vp_stage, vp_size) == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether this is the last of a rank's `vp_size` model chunks; a single chunk is."""
    return _place(vp_stage, vp_size) == max(vp_size or 1, 1) - 1


def _place(vp_stage: int | None, vp_size: int | None) -> int | None:
    if vp_size is not None and vp_size > 1:
        return vp_stage
    if vp_stage not in (None, 0):
        raise AssertionError(f"Expected vp_stage to be 0 or None with {vp_size=}, but got {vp_stage=}")
    return 0


_patches = Patches(_WHAT)
