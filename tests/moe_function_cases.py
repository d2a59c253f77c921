"""Calls of Megatron-core's routing functions, for comparing what two releases make of the same inputs.

Run as a program, without npu_replay, it saves the results of the release that is on the path.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

ROWS, EXPERTS = 24, 8
FUNCTIONS = {
    "topk_routing_with_score_function": "megatron.core.transformer.moe.moe_utils",
    "is_vp_first_stage": "megatron.core.pipeline_parallel.utils",
    "is_vp_last_stage": "megatron.core.pipeline_parallel.utils",
}
GROUPS: dict[str, Any] = {"num_groups": 4, "group_topk": 2}
ROUTING: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre_softmax": {"use_pre_softmax": True},
    "scaled": {"scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid_bias": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "groups": GROUPS,
    "groups_pre_softmax": GROUPS | {"use_pre_softmax": True},
    "groups_sigmoid_bias": GROUPS | {"score_function": "sigmoid", "expert_bias": True},
    "one_group": {"num_groups": 1, "group_topk": 1},
}


def function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(__import__(FUNCTIONS[name], fromlist=[name]), name)
    return found


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different in every element, so that nothing depends on how a top-k orders equals."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(ROWS, EXPERTS, generator=generator)
    return values.to(dtype).requires_grad_()


def targets(topk: int) -> torch.Tensor:
    """Somebody else's choice, int64 [rows, topk]: also of experts that the router would never take."""
    generator = torch.Generator().manual_seed(6)
    return torch.rand(ROWS, EXPERTS, generator=generator).argsort(dim=1)[:, :topk]


def routed(name: str, topk: int, dtype: torch.dtype, **more: Any) -> tuple[torch.Tensor, ...]:
    """Probabilities, map, and the logits' gradient."""
    options = ROUTING[name] | more
    if options.get("expert_bias") is True:
        options["expert_bias"] = torch.linspace(-0.4, 0.4, EXPERTS)
    scores = logits(dtype)
    probs, routing_map = function("topk_routing_with_score_function")(scores, topk, **options)
    return probs.detach(), routing_map, gradient(probs, scores)  # with dense_output: ids for the map


def gradient(probs: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(1, 2, probs.numel()).view_as(probs)
    (found,) = torch.autograd.grad((probs * weights).sum(), of)
    return found


def stage(name: str, vp_stage: int | None, vp_size: int | None) -> object:
    try:
        return function(name)(vp_stage, vp_size)
    except AssertionError:
        return "AssertionError"


def replayed(name: str, topk: int, action: str, **more: Any) -> tuple[torch.Tensor, ...]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    replay = RouterReplay()
    replay.set_router_replay_action(RouterReplayAction(action))
    replay.set_target_indices(targets(topk))
    found = routed(name, topk, torch.float32, router_replay=replay, **more)
    recorded = replay.get_recorded_indices()
    return found if recorded is None else (*found, recorded)


def results() -> Iterator[tuple[str, Any]]:
    """Name and result of every case; a name says what it is about."""
    for topk in (1, 4):
        for dtype in (torch.float32, torch.bfloat16):
            for name, options in ROUTING.items():
                fewer = {"group_topk": 1} if "group_topk" in options and topk == 1 else {}
                yield f"topk {name} {topk} {dtype}", routed(name, topk, dtype, **fewer)
    for name in ("is_vp_first_stage", "is_vp_last_stage"):
        for vp_size in (None, 1, 2, 3):
            for vp_stage in (None, 0, 1, 2):
                yield f"{name} {vp_stage} {vp_size}", stage(name, vp_stage, vp_size)


def replay_results() -> Iterator[tuple[str, Any]]:
    for name in ROUTING:
        for action in ("record", "replay_forward", "replay_backward"):
            yield f"{action} {name}", replayed(name, 2, action)


def dense_results() -> Iterator[tuple[str, Any]]:
    """From 0.17 on."""
    for name in ROUTING:
        yield f"dense {name}", routed(name, 2, torch.float32, dense_output=True)
        for action in ("record", "replay_forward", "replay_backward"):
            yield f"dense {action} {name}", replayed(name, 2, action, dense_output=True)


def signatures() -> dict[str, list[str]]:
    """Each function's arguments and their defaults, «fused=False»."""
    return {
        name: [
            str(argument.replace(annotation=inspect.Parameter.empty))
            for argument in inspect.signature(function(name)).parameters.values()
        ]
        for name in FUNCTIONS
    }


if __name__ == "__main__":
    found = dict(results())
    if find_spec("megatron.core.transformer.moe.router_replay") is not None:
        found |= dict(replay_results())
    if "dense_output" in inspect.signature(function("topk_routing_with_score_function")).parameters:
        found |= dict(dense_results())
    torch.save({"results": found, "signatures": signatures()}, sys.argv[1])
