"""MindSpeed-LLM's routing in a real Megatron TopKRouter: its own functions where its sources are on the path,
and stand-ins that make the same calls in the same order where they are not.

MindSpeed-LLM replaces the router's methods on the class, and takes what Megatron's config doesn't have from
global arguments, which its configs carry too. `bind` does the same.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROUTER = "mindspeed_llm.core.transformer.moe.router"
PACKAGES = (
    "mindspeed_llm",
    "mindspeed_llm.core",
    "mindspeed_llm.core.transformer",
    "mindspeed_llm.core.transformer.moe",
    "mindspeed_llm.tasks",
    "mindspeed_llm.tasks.models",
    "mindspeed_llm.tasks.models.common",
)
ARGS: dict[str, Any] = {
    "micro_batch_size": 1,
    "num_experts": 8,
    "num_zero_experts": None,
    "expert_model_parallel_size": 1,
    "padded_vocab_size": 64,
    "moe_router_topk": 2,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_device_level_aux_loss_coeff": 0.0,
    "moe_comm_aux_loss_coeff": 0.0,
    "moe_permutation_async_comm": False,
    "moe_revert_type_after_topk": False,
    "moe_tp_extend_ep": False,
    "n_hash_layers": 0,
    "norm_topk_prob": False,
    "router_gating_in_fp32": False,
    "seq_aux": False,
    "topk_softmax_in_fp32": False,
    "fix_router": False,
}
"""MindSpeed-LLM's defaults of the arguments that its router reads, for megatron_model's config."""

_current = Namespace(**ARGS)


class _Recast:
    """What the router asks of MindSpeed's CheckpointWithoutOutput; this one keeps the output."""

    def checkpoint(self, function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)

    def discard_output(self) -> None: ...

    def recompute(self, _: torch.Tensor) -> None: ...


def missing() -> str:
    """Why MindSpeed-LLM's own router can't be loaded here; empty if it can."""
    spec = find_spec("mindspeed_llm")
    if spec is None or spec.origin is None:
        return "mindspeed_llm is not on the path"
    utils = find_spec("megatron.core.transformer.moe.moe_utils")
    source = "" if utils is None or utils.origin is None else Path(utils.origin).read_text(encoding="utf-8")
    if "def topk_softmax_with_capacity" not in source:
        return "this Megatron-core has no topk_softmax_with_capacity, which MindSpeed-LLM's router imports"
    return ""


@contextmanager
def real_router() -> Iterator[Any]:
    """MindSpeed-LLM's router module alone, without its packages' own code, which wants half a cluster."""
    root = Path(find_spec("mindspeed_llm").origin).parent.parent
    lent = {name: ModuleType(name) for name in (*PACKAGES, "megatron.training")}
    for name in PACKAGES:
        lent[name].__path__ = [str(root.joinpath(*name.split(".")))]
    lent["megatron.training"].get_args = lambda: _current  # type: ignore[attr-defined]
    lent |= {name: ModuleType(name) for name in _ancestors("mindspeed.core.tensor_parallel.random")}
    lent["mindspeed.core.tensor_parallel.random"].CheckpointWithoutOutput = _Recast  # type: ignore[attr-defined]
    before = dict(sys.modules)
    sys.modules.update(lent)
    try:
        yield importlib.import_module(ROUTER)
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] in ("mindspeed_llm", "mindspeed")] + [*lent]:
            sys.modules.pop(name, None)
            if name in before:
                sys.modules[name] = before[name]


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


# What MindSpeed-LLM binds to the router, in our own words


def stand_in_hash(self: Any) -> None:
    """The first layers look their experts up by the token."""
    self.hash = self.layer_number <= _current.n_hash_layers
    if self.hash:
        tokens = torch.arange(_current.padded_vocab_size)[:, None]
        table = (tokens + torch.arange(self.topk)) % _current.num_experts
        self.tid2eid = torch.nn.Parameter(table, requires_grad=False)
        self.expert_bias = None


def stand_in_forward(self: Any, input: torch.Tensor, input_ids: torch.Tensor | None = None) -> Any:
    return self.routing(self.gating(input), input_ids)


def stand_in_global_forward(self: Any, input: torch.Tensor) -> Any:
    logits = self.gating(input)
    return *self.routing(logits), logits.detach()


def stand_in_routing(self: Any, logits: torch.Tensor, input_ids: torch.Tensor | None = None) -> Any:
    logits = logits.view(-1, self.num_experts)
    if _current.n_hash_layers and self.routing_type == "none":
        return _hashed(self, logits, input_ids)
    return _STAND_INS[self.routing_type](self, logits)


def _map(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).int().scatter(1, ids, 1).bool()


def _plain(self: Any, logits: torch.Tensor) -> Any:
    scores, ids = torch.topk(logits, k=self.topk, dim=1)
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(logits)
    return torch.zeros_like(logits).scatter(1, ids, probs), _map(logits, ids)


def _softmax_first(self: Any, logits: torch.Tensor) -> Any:
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if self.expert_bias is not None:
        _, ids = torch.topk(scores + self.expert_bias, k=self.topk, dim=1)
        values = torch.gather(scores, dim=1, index=ids)
    else:
        values, ids = torch.topk(scores, k=self.topk, dim=1)
    if _current.norm_topk_prob:
        values = values / values.sum(dim=-1, keepdim=True)
    if self.config.moe_router_topk_scaling_factor is not None:
        values *= self.config.moe_router_topk_scaling_factor
    return torch.zeros_like(scores).scatter(1, ids, values), _map(scores, ids)


def _grouped(self: Any, logits: torch.Tensor) -> Any:
    """The mask is a fill with 0, between two top-k, neither of them sorted."""
    scores = torch.softmax(logits, dim=1)
    rows = len(scores)
    groups = self.n_group
    best = scores.view(rows, groups, -1).max(dim=-1).values
    taken = torch.topk(best, k=_current.moe_router_group_topk, dim=-1, sorted=False)[1]
    open_groups = torch.zeros_like(best).scatter_(1, taken, 1)
    mask = open_groups.unsqueeze(-1).expand(rows, groups, scores.shape[1] // groups).reshape(rows, -1)
    masked = scores.masked_fill(~mask.bool(), 0.0)
    values, ids = torch.topk(masked, k=_current.moe_router_topk, dim=-1, sorted=False)
    if _current.norm_topk_prob:
        values = values / (values.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        values = values * _current.moe_router_topk_scaling_factor
    self.l_aux = (scores.mean(0) * _map(scores, ids).float().mean(0)).sum()
    return torch.zeros_like(logits).scatter(1, ids, values), _map(logits, ids)


def _two_arg_max(self: Any, logits: torch.Tensor) -> Any:
    """No top-k at all: the best, then the best of the rest; with noise while training."""
    first = logits.max(dim=-1, keepdim=True)[1]
    rest = torch.scatter(logits, -1, first, float("-inf"))
    ids = torch.cat((first, rest.max(dim=-1, keepdim=True)[1]), dim=-1)
    return torch.zeros_like(logits).scatter(1, ids, logits.softmax(1).gather(1, ids)), _map(logits, ids)


def _hashed(self: Any, logits: torch.Tensor, input_ids: torch.Tensor | None) -> Any:
    scores = torch.nn.functional.softplus(logits.float()).sqrt().type_as(logits)
    if getattr(self, "hash", False) and self.expert_bias is None and input_ids is not None:
        ids = self.tid2eid[input_ids.flatten()]
    else:
        ids = torch.topk(scores, k=self.topk, dim=1)[1]
    values = scores.gather(1, ids)
    probs = values / (values.sum(dim=-1, keepdim=True) + 1e-20)
    return torch.zeros_like(logits).scatter(1, ids, probs), _map(logits, ids)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "none": _plain,
    "softmax_topk": _softmax_first,
    "pai_megatron_aux_loss": _softmax_first,
    "aux_loss": _softmax_first,
    "group_limited_greedy": _grouped,
    "sparsemixer_topk": _two_arg_max,
}


def bind(patch: pytest.MonkeyPatch, source: Any, **args: Any) -> Namespace:
    """Put MindSpeed-LLM's methods on TopKRouter, as its features do, with these global arguments.

    Args:
        source: MindSpeed-LLM's router module, or None for the stand-ins.
    """
    from megatron.core.transformer.moe import router

    vars(_current).clear()
    vars(_current).update(ARGS | args)
    methods = _stand_ins() if source is None else _real(source, router.TopKRouter)
    for name, method in methods.items():
        patch.setattr(router.TopKRouter, name, method, raising=False)
    return _current


def _stand_ins() -> dict[str, Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    native = TopKRouter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        if _current.num_zero_experts:
            self.num_experts = _current.num_experts + _current.num_zero_experts
            weight = torch.empty(self.num_experts, self.config.hidden_size)
            self.weight = torch.nn.Parameter(torch.nn.init.normal_(weight, std=0.02))
        self.n_group = _current.moe_router_num_groups or _current.expert_model_parallel_size

    methods = {
        "__init__": init,
        "routing": stand_in_routing,
        "forward": stand_in_global_forward
        if getattr(_current, "use_global_aux_loss", False)
        else stand_in_forward,
        "build_hash_module": stand_in_hash,
    }
    stand_in_routing.__module__ = ROUTER
    return methods


def _real(source: Any, owner: Any) -> dict[str, Any]:
    methods = {
        "__init__": source.topk_router_init_wrapper(owner.__init__),
        "routing": source.topk_router_routing,
        "gating": source.topk_router_gating_func,
    }
    # 2.3.0 has neither hash layers nor the global loss.
    if hasattr(source, "topk_router_forward_patch"):
        methods["forward"] = source.topk_router_forward_patch
        methods["build_hash_module"] = source.topk_router_build_hash_module
    if getattr(_current, "use_global_aux_loss", False) and hasattr(source, "global_aux_loss_load_balancing"):
        methods["forward"] = source.global_aux_loss_topk_router_forward
        methods["aux_loss_load_balancing"] = source.global_aux_loss_load_balancing
    return methods
