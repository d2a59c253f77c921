"""Adds functions of later Megatron-core releases that frameworks import, each where the release lacks it.

    topk_routing_with_score_function      new in 0.14; without router_replay before 0.16 (dense_output: 0.17)
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

from npu_replay.compat.megatron.routers import is_replaying
from npu_replay.compat.megatron_backports.router_replay import Asked, asking, is_idle
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Change, Patches
from npu_replay.errors import NoEffect
from npu_replay.seam.plan import Plan

MODULE = "megatron.core.transformer.moe.moe_utils"
STAGES = "megatron.core.pipeline_parallel.utils"

_WHAT = "functions of later Megatron-core releases"
_TOPK = "topk_routing_with_score_function"
_ADDED = "a later release's, over this one's own"

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Two tensors [rows, experts]: probabilities and a bool map of the chosen experts."""


def install() -> None:
    import_hook.when_imported(MODULE, f"{_WHAT}: routing", _add_routing)
    import_hook.when_imported(STAGES, f"{_WHAT}: virtual stages", _add_stages)
    import_hook.serve(STAGES, _fill_stages, "is_vp_first_stage and is_vp_last_stage", _WHAT)


# Adding


def _add_routing(module: Any) -> None:
    native = getattr(module, _TOPK, None)
    known = {} if native is None else inspect.signature(native).parameters
    if native is None:

        def without_capacity(logits: torch.Tensor, topk: int, *, fused: bool, **how: Any) -> Pair:
            if fused:
                raise ValueError(
                    "fused=True, but Megatron-core 0.12 and 0.13 have no fused router: it came with 0.14"
                )
            probs, routing_map, _ = module.topk_softmax_with_capacity(logits, topk, **how)
            return probs, routing_map

        _patches.set(module, _TOPK, _with_replay(without_capacity), _ADDED)
    elif "router_replay" not in known and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()
    ):
        # Every module that holds the function: MindSpeed replaces those that hold the same one.
        ours = _with_replay(native)

        def undo() -> bool:
            replaced = vars(module).get(_TOPK) is ours
            _rebind(_TOPK, ours, native)
            return replaced

        _rebind(_TOPK, native, ours)
        _patches.add(Change(f"{module.__name__}.{_TOPK}", "takes router_replay", undo))


def _add_stages(module: Any) -> None:
    for function in (is_vp_first_stage, is_vp_last_stage):
        if not hasattr(module, function.__name__):
            _patches.set(module, function.__name__, function, _ADDED)


def _fill_stages(module: Any) -> None:
    vars(module).update(is_vp_first_stage=is_vp_first_stage, is_vp_last_stage=is_vp_last_stage)


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

        The arguments are those of Megatron 0.17. A replay doesn't use the fused kernel.

        Returns:
            The probabilities in the logits' dtype, and the map, bool; both [rows, experts]. With
            `dense_output` the probabilities and the ids, int64, in the order of the top-k; both [rows, topk].
        """
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
        plan = Plan(num_experts=logits.shape[-1], topk=topk, is_given=is_replaying(router_replay))
        call = Asked(router_replay, plan, logits.shape[0], (num_groups, group_topk))
        with asking(call, fused=fused):
            probs, routing_map = native(logits, topk, **how)
        if not dense_output:
            return probs, routing_map
        if call.ids is None:
            raise NoEffect(
                "this release's routing calls no top-k, so there is no order for a dense output",
                where=_TOPK,
                cause="another function in the place of Megatron's, such as MindSpeed's fix_router",
            )
        return probs.gather(1, call.ids), call.ids

    return topk_routing_with_score_function


def _own_topk(scores: Any, topk: int, num_groups: Any, group_topk: Any, own: Any) -> Any:
    return own(scores, topk, num_groups=num_groups, group_topk=group_topk)


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
