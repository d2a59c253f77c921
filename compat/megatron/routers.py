"""Describes Megatron-core's TopKRouter, of any release; MindSpeed's is the same class."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from npu_replay.compat.megatron import aux_losses, foreign_routing, fused_router, hybrid, parallel_state
from npu_replay.compat.mindspeed import fb_overlap, features, llm
from npu_replay.compat.patching import import_hook
from npu_replay.errors import NoEffect, RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.routers import Handle, Router, RouterKind
from npu_replay.routes import arguments
from npu_replay.seam.dropped import least_positive
from npu_replay.sessions.timeline import Marks

_ROUTER_MODULE = "megatron.core.transformer.moe.router"
IDLE_WITHOUT_ACTION = "npu_replay_idle_without_action"
"""The class attribute of a framework's RouterReplay that need not be asked without an action."""
_TWO_WAYS = "two ways of replaying at once; use npu_replay's blocks or RouterReplay"
_FUSED = (
    f"moe_router_fusion=True, and a kernel other than {fused_router.MODULE}.{fused_router.KERNEL}; "
    "set moe_router_fusion=False"
)


class MegatronRouters(RouterKind):
    """Recognises Megatron's routers; imports nothing, since a model that holds one has imported it."""

    def may_be_router(self, module: nn.Module, path: str) -> bool:
        return any(base.__module__ == _ROUTER_MODULE for base in type(_adapted(module)).__mro__)

    def describe(self, module: nn.Module, path: str) -> Router | None:
        """Describe a TopKRouter; refuse another router class, and configurations that can't be replayed."""
        product: Any = sys.modules.get(_ROUTER_MODULE)
        if product is None or not isinstance(_adapted(module), product.Router):
            return None
        if module is not _adapted(module):
            inner = self.describe(_adapted(module), path)
            return None if inner is None else replace(inner, module=module)
        if parallel_state.is_in_mtp(path):
            return None
        if not isinstance(module, product.TopKRouter):
            raise RouterError(
                f"{type(module).__name__} can't be replayed",
                where=path,
                expected="a TopKRouter or a subclass",
                got=f"another subclass of Router ({type(module).__module__})",
            )
        import_hook.refuse_failures()
        if llm.looks_up(module):
            return None  # a hash layer: the token id alone decides, so every pass chooses alike
        config: Any = module.config
        _refuse(module, path)
        features.refuse_features(config, path)
        number: Any = module.layer_number
        top_k = top_k_of(module)
        return Router(
            module=module,
            **top_k,
            shows=_shows_with_drops if top_k["drops"] else partial(_shows, top_k["num_experts"]),
            layer=None if number is None else int(number) - 1,
            depth=int(getattr(config, "num_layers", None) or 0),
            masks=bool(config.moe_router_group_topk) or not foreign_routing.is_known(module),
            gathers=gathered_ranks(config),
            aux_losses=aux_losses.of(module),
            row_order="sequence",
            bypass=_FUSED if fused_router.is_on(config) else "",
            mend=_without_exact_zeros if config.moe_token_dispatcher_type == "flex" else None,
        )

    def mark(self, chunk: nn.Module, routers: Sequence[Router], marks: Marks) -> list[Handle]:
        """Mark what MindSpeed's moe_fb_overlap recomputes, and let the kernel of a fused router ask."""
        handles: list[Handle] = list(fb_overlap.mark(chunk, routers, marks))
        if any(fused_router.is_on(getattr(_adapted(router.module), "config", None)) for router in routers):
            handles.append(fused_router.HeldKernel())
        return handles

    def labelled(self, chunk: ModuleTree, routers: list[Router]) -> list[Router]:
        return hybrid.labelled(chunk, routers)

    def accepts_none(self, chunks: Sequence[ModuleTree]) -> bool:
        return parallel_state.is_dense_stage(chunks)

    def check_chunks(self, chunks: Sequence[ModuleTree]) -> None:
        parallel_state.check_chunks(chunks)


def _adapted(module: Any) -> Any:
    """Return the router that an adapter calls in parts (Megatron-Bridge's LoRATopKRouter), or itself."""
    return module.to_wrap if "to_wrap" in module._modules else module


def _shows(num_experts: int, output: object) -> torch.Tensor:
    """Return the routing map, bool [rows, experts], of a router's output (probs, routing_map).

    In Megatron's own inference the router returns ids, [rows, topk], instead of a map, which are returned.
    """
    routing_map = _pair(output)[1]
    if routing_map.dtype == torch.bool:
        return routing_map
    holds_ids = routing_map.dtype in arguments.INTEGERS and routing_map.shape[-1:] != (num_experts,)
    return routing_map if holds_ids else routing_map.to(torch.bool)


def _shows_with_drops(output: object) -> torch.Tensor:
    """Return the experts with a probability; the map also holds tokens that pad to capacity."""
    return _pair(output)[0] != 0


def _pair(output: object) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(output, tuple) and len(output) >= 2:
        probs, routing_map = output[:2]
        if isinstance(probs, torch.Tensor) and isinstance(routing_map, torch.Tensor):
            return probs, routing_map
    raise NoEffect(
        "the router's output can't be read",
        expected="(probs, routing_map)",
        got=type(output).__name__,
        cause="a fork of Megatron-core whose router returns something else, or MindSpeed-LLM's "
        "moe_permutation_async_comm, with which the map is still under way",
    )


def _without_exact_zeros(output: object, ids: torch.Tensor) -> object:
    """Lift chosen probabilities that are zero: DeepEP's dispatcher finds the experts by a top-k over them."""
    probs, routing_map = _pair(output)
    chosen = torch.zeros_like(routing_map).scatter(1, ids, True) & routing_map
    lifted = probs.masked_fill(chosen & (probs == 0), least_positive(probs.dtype))
    return lifted, *output[1:]  # type: ignore[index]


def top_k_of(router: Any) -> dict[str, Any]:
    """Return what `Router` and `Plan` say alike of a TopKRouter's top-k, by the names of their attributes."""
    config = router.config
    experts = int(router.num_experts)
    groups = int(config.moe_router_num_groups or experts)
    return {
        "num_experts": experts,
        "topk": int(router.topk),
        "drops": config.moe_expert_capacity_factor is not None,
        "leaves": int(config.moe_router_group_topk or 0) * (experts // groups),
        "spare": int(router.routing_type == "quantile_balancing"),  # its top-k asks for one more
    }


def gathered_ranks(config: Any) -> int:
    """Return over how many ranks the logits are gathered before the top-k (alltoall_seq of Megatron 0.12)."""
    if config.moe_token_dispatcher_type != "alltoall_seq":
        return 1
    return int(config.tensor_model_parallel_size)


_NO_ROUTER = {"attn", "mlp", "mamba"}
"""The parts of a layer that a graph may capture without its router, by Megatron's names."""


def _graph_around_routers(config: Any) -> str:
    """Return the settings by which a graph captures the routers; empty if none does."""
    # From 0.15 on a config reads the older flags into this.
    implementation = getattr(config, "cuda_graph_impl", None)
    asked = f"cuda_graph_impl={implementation!r}"
    if implementation is None:
        flags = ("enable_cuda_graph", "external_cuda_graph")
        asked = ", ".join(f"{flag}=True" for flag in flags if getattr(config, flag, False))
    if not asked or implementation == "none":
        return ""
    field = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    scope = getattr(config, field, None) or []
    parts = {getattr(part, "name", part) for part in (scope.split(",") if isinstance(scope, str) else scope)}
    # Graphs of Megatron's own (enable_cuda_graph, "local") hold whole layers, whatever their scope.
    by_parts = implementation == "transformer_engine" or asked == "external_cuda_graph=True"
    if by_parts and parts and parts <= _NO_ROUTER:
        return ""
    return f"{asked}, {field}={', '.join(sorted(parts)) or 'full'}"


def _refuse(module: Any, path: str) -> None:
    """Refuse configurations that can't be replayed, and a router whose RouterReplay is replaying."""
    config = module.config
    action = _upstream_replay(module)
    graph = _graph_around_routers(config)
    # Quantile balancing runs one top-k over the tokens of all ranks of this group.
    quantile = module.routing_type == "quantile_balancing" and module.tp_cp_group is not None
    ranks = int(module.tp_cp_group.size()) if quantile else 1
    if graph:
        raise RouterError(
            "the router is captured in a graph, which runs no hook",
            where=path,
            expected="no graph capture around the router",
            got=graph,
            cause="the model's config: capture the attention alone, by cuda_graph_impl='transformer_engine' "
            "(graphs of Megatron's own hold whole layers), or train without graphs",
        )
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        # It runs pieces of layers of two micro-batches in turn and never calls the model.
        raise RouterError(
            "the schedule runs layers past the model's __call__, so micro-batches can't be told apart",
            where=path,
            expected="overlap_moe_expert_parallel_comm=False",
            got="overlap_moe_expert_parallel_comm=True",
            cause="the model's config; combined 1F1B calls build_schedule_plan() instead of the model",
        )
    if action is not None:
        raise RouterError(
            "RouterReplay is replaying on this router",
            where=path,
            expected="none: RouterReplay.clear_global_router_replay_action()",
            got=action,
            cause=_TWO_WAYS,
        )
    if ranks > 1:
        raise RouterError(
            "quantile balancing chooses over the tokens of several ranks at once, and can't be replayed",
            where=path,
            expected="one rank in the router's tensor and context parallel group",
            got=f"{ranks} ranks, moe_router_load_balancing_type='quantile_balancing'",
            cause="the model's config; take another load balancing for the replay, or no tensor and "
            "context parallelism",
        )


def is_replaying(replay: Any) -> bool:
    """Return whether a RouterReplay's action is a replay, by its name: a framework may have its own enum."""
    action = action_of(replay)
    if action is None:
        return False
    name = str(getattr(action, "name", "")).lower()
    value = str(getattr(action, "value", "")).lower()
    return name.startswith("replay") or value.startswith("replay")


def action_of(replay: Any) -> Any:
    """Return a RouterReplay's action; None also where a framework's own has no such attribute."""
    return getattr(replay, "router_replay_action", None)


def _upstream_replay(module: Any) -> Any:
    """Return the replaying action of the RouterReplay, upstream's or ours, of a router; None otherwise."""
    replay = getattr(module, "router_replay", None)
    return action_of(replay) if is_replaying(replay) else None
