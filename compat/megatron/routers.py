"""Megatron-core: its TopKRouter, of any release, and MindSpeed's, which is the same class."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from npu_replay.compat import torch_npu
from npu_replay.compat.megatron import aux_losses, hybrid, parallel_state, router_call
from npu_replay.compat.mindspeed import fb_overlap, features, llm
from npu_replay.compat.patching import import_hook
from npu_replay.errors import NoEffect, RouterError
from npu_replay.routers import Handle, Router, RouterKind
from npu_replay.sessions.capacity import least_positive
from npu_replay.sessions.micro_batches import Marks

_ROUTER_MODULE = "megatron.core.transformer.moe.router"
_METHODS = ("forward", "routing")
_TOP_K_FUNCTIONS = ("topk_softmax_with_capacity", "topk_routing_with_score_function")
_TWO_WAYS = "two ways of replaying at once; use npu_replay's blocks or RouterReplay"
_FUSED = (
    f"moe_router_fusion=True, and a kernel other than {router_call.MODULE}.{router_call.KERNEL}; "
    "set moe_router_fusion=False"
)


class MegatronRouters(RouterKind):
    """Recognises Megatron's routers. Imports nothing: a model can only hold one if it is imported."""

    def describe(self, module: nn.Module, path: str) -> Router | None:
        """Describe a TopKRouter; refuse another router class, and what configuration rules out."""
        product: Any = sys.modules.get(_ROUTER_MODULE)
        if product is None or not isinstance(module, product.Router):
            return None
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
        features.refuse_half_import()
        if llm.looks_up(module):
            return None  # a hash layer: the token alone decides, in every pass alike
        config: Any = module.config
        llm.refuse(module, path)
        _refuse(module, path)
        features.refuse_features(config, path)
        number: Any = module.layer_number
        drops = config.moe_expert_capacity_factor is not None
        return Router(
            module=module,
            num_experts=int(module.num_experts),
            topk=int(module.topk),
            shows=_shows_with_drops if drops else _shows,
            layer=None if number is None else int(number) - 1,
            drops=drops,
            masks=bool(config.moe_router_group_topk),
            gathers=gathered_ranks(config),
            call=router_call.of(module, drops=drops),
            aux_losses=aux_losses.of(module),
            row_order="sequence",
            bypass=_FUSED if router_call.is_fused(config) else "",
            mend=_without_exact_zeros if config.moe_token_dispatcher_type == "flex" else None,
        )

    def explains(self, operator: str) -> str:
        """Is this a fused operator that takes the place of the top-k?"""
        return torch_npu.gating_operator(operator)

    def diverts(self, module: nn.Module) -> str:
        """Was RouterReplay told to replay since the block was entered?"""
        action = _upstream_replay(module)
        return "" if action is None else f"RouterReplay was given {action} inside the block: {_TWO_WAYS}"

    def mark(self, chunk: nn.Module, routers: Sequence[Router], marks: Marks) -> list[Handle]:
        """Mark what MindSpeed's moe_fb_overlap runs again; have a fused router's kernel ask too."""
        handles: list[Handle] = list(fb_overlap.mark(chunk, routers, marks))
        if any(router_call.is_fused(getattr(router.module, "config", None)) for router in routers):
            handles.append(router_call.HeldKernel())
        return handles

    def functions(self, routers: Sequence[Router]) -> Iterator[tuple[str, object, str]]:
        """What these routers' calls go through: of their classes, of their own, and Megatron's functions."""
        product: Any = sys.modules.get(_ROUTER_MODULE)
        if product is None:
            return
        ours = [router for router in routers if isinstance(router.module, product.TopKRouter)]
        classes = {product.TopKRouter, *(base for router in ours for base in type(router.module).__mro__)}
        owners = [(kind.__name__, kind) for kind in classes if issubclass(kind, nn.Module)]
        for where, owner in owners + [(router.path, router.module) for router in ours]:
            for name in _METHODS:
                yield f"{where}.{name}", owner, name
        for name in _TOP_K_FUNCTIONS:
            yield name, product, name

    def labelled(self, chunk: nn.Module, routers: list[Router]) -> list[Router]:
        """Label the routers of a HybridModel by its pattern."""
        return hybrid.labelled(chunk, routers)

    def accepts_none(self, chunks: Sequence[nn.Module]) -> bool:
        """A stage of an MoE model's pipeline whose layers are all dense, by its config."""
        return parallel_state.is_dense_stage(chunks)

    def check_chunks(self, chunks: Sequence[nn.Module]) -> None:
        """Refuse some of a rank's virtual stages in the place of all of them."""
        parallel_state.check_chunks(chunks)


def _shows(output: object) -> torch.Tensor:
    """routing_map, bool [rows, experts]: Megatron's routers return (probs, routing_map)."""
    routing_map = _pair(output)[1]
    return routing_map if routing_map.dtype == torch.bool else routing_map.to(torch.bool)


def _shows_with_drops(output: object) -> torch.Tensor:
    """Experts with a probability: with padding to capacity the map also holds tokens that nobody chose."""
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
        cause="a fork of Megatron-core whose router returns something else",
    )


def _without_exact_zeros(output: object, ids: torch.Tensor) -> object:
    """Lift probabilities that underflowed to zero: DeepEP's dispatcher finds the experts by a top-k over
    the probabilities, so a chosen expert with an exact zero would lose its place to one that nobody chose."""
    probs, routing_map = _pair(output)
    chosen = torch.zeros_like(routing_map).scatter(1, ids, True) & routing_map
    lifted = probs.masked_fill(chosen & (probs == 0), least_positive(probs.dtype))
    return lifted, *output[1:]  # type: ignore[index]


def gathered_ranks(config: Any) -> int:
    """Megatron 0.12's alltoall_seq gathers the logits of the tensor-parallel group before the top-k."""
    if config.moe_token_dispatcher_type != "alltoall_seq":
        return 1
    return int(config.tensor_model_parallel_size)


def _refuse(module: Any, path: str) -> None:
    """Refuse what its configuration rules out, and a replay of Megatron's own that is on."""
    config = module.config
    graphs, action, ranks = _captures(config), _upstream_replay(module), _ranks_of_top_k(module)
    cause = "the model's config; "
    if graphs:
        # A captured graph replays its kernels and runs no hook.
        problem = "the router is captured in a graph, which runs no hook"
        expected = "no graph capture around the router"
        got = ", ".join(graphs)
        cause += "capture the attention alone, or train without graphs"
    elif getattr(config, "overlap_moe_expert_parallel_comm", False):
        # It runs pieces of layers of two micro-batches in turn and never calls the model.
        problem = (
            "the schedule runs the layers past the model's __call__, so micro-batches can't be told apart"
        )
        expected = "overlap_moe_expert_parallel_comm=False"
        got = "overlap_moe_expert_parallel_comm=True"
        cause += "combined 1F1B calls build_schedule_plan() instead of the model"
    elif action is not None:
        problem, got, cause = "RouterReplay is replaying on this router", action, _TWO_WAYS
        expected = "none: RouterReplay.clear_global_router_replay_action()"
    elif ranks > 1:
        problem = "quantile balancing chooses over the tokens of several ranks at once, and can't be replayed"
        expected = "one rank in the router's tensor and context parallel group"
        got = f"{ranks} ranks, moe_router_load_balancing_type='quantile_balancing'"
        cause += "take another load balancing for the replay, or no tensor and context parallelism"
    else:
        return
    raise RouterError(problem, where=path, expected=expected, got=got, cause=cause)


def _captures(config: Any) -> list[str]:
    """The flags by which a graph captures the router."""
    flags = [flag for flag in ("enable_cuda_graph", "external_cuda_graph") if getattr(config, flag, False)]
    implementation = getattr(config, "cuda_graph_impl", None)
    if implementation not in (None, "none"):
        scope = getattr(config, "cuda_graph_scope", None) or "full"
        names = scope if isinstance(scope, list | tuple) else [scope]
        if any(str(getattr(name, "value", name)).split(".")[-1] != "attn" for name in names):
            flags.append(f"cuda_graph_impl={implementation!r} with cuda_graph_scope={scope!r}")
    return flags


def _ranks_of_top_k(router: Any) -> int:
    """Quantile balancing's top-k runs over the tokens of all ranks, and each rank takes its rows."""
    if router.routing_type != "quantile_balancing" or router.tp_cp_group is None:
        return 1
    return int(router.tp_cp_group.size())


def is_replaying(replay: Any) -> bool:
    """Are its router's ids given to it? By what the action is called: a framework may have its own."""
    action = action_of(replay)
    called = (getattr(action, "name", ""), getattr(action, "value", ""))
    return any(str(word).lower().startswith("replay") for word in called)


def action_of(replay: Any) -> Any:
    """Its action; None also where a framework's own has no such attribute."""
    return getattr(replay, "router_replay_action", None)


def is_by_session(replay: Any) -> bool:
    """Does it only open and close sessions of npu_replay, which answer the top-k? A class says so."""
    return bool(getattr(type(replay), "npu_replay_by_session", False))


def _upstream_replay(module: Any) -> Any:
    """The action of RouterReplay, upstream's from 0.16 on or ours before, that answers a router's top-k."""
    replay = getattr(module, "router_replay", None)
    return action_of(replay) if is_replaying(replay) and not is_by_session(replay) else None
