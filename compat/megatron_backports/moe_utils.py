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

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch

from npu_replay.compat.megatron_backports.router_replay import Asked, asked, is_idle, no_top_k
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Change, Patches
from npu_replay.errors import ReplayError

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
        expected, got = f"{_TOPK} or topk_softmax_with_capacity", "neither"
        cause = "a fork of Megatron-core, or a release that npu_replay hasn't seen"
        known_one = hasattr(module, "topk_softmax_with_capacity")
        problem = "no function that routes is known"
        ReplayError.unless(known_one, problem, expected, got, cause, module.__name__)

        def without_capacity(logits: torch.Tensor, topk: int, *, fused: bool, **how: Any) -> Pair:
            if fused:
                _refuse_fused(_TOPK)
            probs, routing_map, _ = module.topk_softmax_with_capacity(logits, topk, **how)
            return probs, routing_map

        _patches.set(module, _TOPK, _with_replay(without_capacity), _ADDED)
    elif "router_replay" not in known and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        # Every module that holds the function: MindSpeed replaces those that hold the same one.
        ours = _with_replay(native)

        def undo() -> bool:
            held = vars(module).get(_TOPK) is ours
            _rebind(_TOPK, ours, native)
            return held

        _rebind(_TOPK, native, ours)
        _patches.add(Change(f"{module.__name__}.{_TOPK}", "takes router_replay", undo))
    _add(module, apply_router_token_dropping, compute_routing_scores_for_aux_loss)


def _add_stages(module: Any) -> None:
    _add(module, is_vp_first_stage, is_vp_last_stage)


def _fill_stages(module: Any) -> None:
    vars(module).update(is_vp_first_stage=is_vp_first_stage, is_vp_last_stage=is_vp_last_stage)


def _add(module: Any, *functions: Callable[..., Any]) -> None:
    for function in functions:
        if not hasattr(module, function.__name__):
            _patches.set(module, function.__name__, function, _ADDED)


def _rebind(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = object.__getattribute__(module, "__dict__")  # not by getattr, which loads a lazy module
            if names.get(name) is old:
                names[name] = new


# Routing


def _with_replay(native: Callable[..., Pair]) -> Callable[..., Pair]:
    def own_topk(scores: Any, topk: int, num_groups: Any, group_topk: Any, own: Any) -> Any:
        return own(scores, topk, num_groups=num_groups, group_topk=group_topk)

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
            problem, expected = "the fused router has no dense output", "fused=False, or dense_output=False"
            cause = "its kernel returns a map, without an order of the experts; upstream returns that map"
            raise NoFusedRouter(problem, where=_TOPK, expected=expected, got="both on", cause=cause)
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
            router_replay = SimpleNamespace(get_replay_topk=own_topk)  # only to learn the ids of the top-k
        call = Asked(router_replay, logits.shape[0], logits.shape[-1], topk, (num_groups, group_topk))
        with asked(call, fused=fused):
            probs, routing_map = native(logits, topk, **how)
        if not dense_output:
            return probs, routing_map
        if call.ids is None:
            problem = "this release's routing calls no top-k, so there is no order for a dense output"
            cause = "another function in the place of Megatron's, such as MindSpeed's fix_router"
            raise no_top_k(problem, call, cause, _TOPK)
        return probs.gather(1, call.ids), call.ids

    return topk_routing_with_score_function


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
    cause = (
        "moe_router_fusion=True with Megatron-core 0.12 or 0.13, which call no kernel of "
        "Transformer Engine's; it came with 0.14"
    )
    problem, expected = "the fused router isn't there", "fused=False"
    raise NoFusedRouter(problem, where=name, expected=expected, got="fused=True", cause=cause)


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
