"""The routing variants and recompute cases that the Megatron tests run through, and how they are run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from npu_replay import RoutedExperts
from npu_replay.devices import pick
from npu_replay.routers import Router, find
from npu_replay.smoke import megatron_model
from zoo import outcome
from zoo.outcome import Grads, backward, changed, check_own_record, checkpointed
from zoo.outcome import gradients as gradients
from zoo.outcome import hooks as hooks
from zoo.outcome import same as same

BATCH = 2
LENGTH = 12
VOCAB = 64
MICRO_BATCHES = 5
"""Number 3 is neither checked nor the last: in it, as in most of a job's, calls are quick."""
DEVICE = pick("auto")
"""Megatron's tests run on an accelerator where there is one."""

SIGMOID_BIAS: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
CAPACITY: dict[str, Any] = {"moe_expert_capacity_factor": 0.75}

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax_after_topk": {},
    "softmax_before_topk": {"moe_router_pre_softmax": True},
    "sigmoid_bias_scaling": SIGMOID_BIAS,
    "groups_softmax": {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "groups_sigmoid_bias": SIGMOID_BIAS | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "one_group": {"moe_router_num_groups": 1, "moe_router_group_topk": 1},
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-2},
    "z_loss": {"moe_z_loss_coeff": 1e-3},
    "capacity_probs": CAPACITY | {"moe_token_drop_policy": "probs"},
    "capacity_position": CAPACITY | {"moe_token_drop_policy": "position"},
    "capacity_padded": CAPACITY | {"moe_pad_expert_input_to_capacity": True},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "dense_first": {"moe_layer_freq": [0, 1, 1, 1]},
    "shared_expert": {"moe_shared_expert_intermediate_size": 32},
}

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": megatron_model.FULL_RECOMPUTE,
    "full_two_layers": megatron_model.FULL_RECOMPUTE | {"recompute_num_layers": 2},
    "block": megatron_model.FULL_RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 2},
    "selective_moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "selective_attention_and_moe": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "moe"],
    },
}
CHECKPOINTS: dict[str, tuple[bool | None, bool | None]] = {
    # name: (around the whole model, around each layer), each reentrant, non-reentrant or absent
    "whole_model_reentrant": (True, None),
    "whole_model_non_reentrant": (False, None),
    "layers_reentrant": (None, True),
    "layers_non_reentrant": (None, False),
    "reentrant_in_reentrant": (True, True),
    "non_reentrant_in_reentrant": (True, False),
    "reentrant_in_non_reentrant": (False, True),
    "non_reentrant_in_non_reentrant": (False, False),
}
ALL_RECOMPUTE = [*RECOMPUTE, *CHECKPOINTS]


def build(variant: dict[str, Any], recompute: str | None = None, seed: int = 7) -> Trainer:
    """A model of this variant, the same weights for every recompute case."""
    outer, inner = CHECKPOINTS.get(recompute or "", (None, None))
    torch.manual_seed(seed)
    model = megatron_model.model(megatron_model.config(**variant, **RECOMPUTE.get(recompute or "", {})))
    model.to(DEVICE)
    for router in routers(model):
        if (bias := getattr(router.module, "expert_bias", None)) is not None:
            bias.copy_(torch.randn(bias.shape) * 0.1)
    if inner is not None:
        for layer in model.decoder.layers:
            layer.forward = checkpointed(layer.forward, reentrant=inner)
    return Trainer(model, outer)


def routers(model: nn.Module) -> list[Router]:
    return find([model])[0]


class Trainer:
    """A model, its micro-batches, and the ways in which people run backward over them."""

    def __init__(self, model: nn.Module, outer: bool | None) -> None:
        self.model = model
        self.outer = outer
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, VOCAB, (MICRO_BATCHES, BATCH, LENGTH), generator=generator).to(DEVICE)
        self.batches = list(tokens)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = megatron_model.causal(tokens)

        def forward(anchor: torch.Tensor | None = None) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=tokens.roll(-1, 1), **inputs)

        if self.outer is None:
            return forward().mean()
        # A reentrant checkpoint has a backward only if an input asks for one.
        anchor = torch.zeros(1, requires_grad=True, device=DEVICE)
        return checkpoint(forward, anchor, use_reentrant=self.outer).mean()

    def run(self, order: str = "each") -> tuple[list[float], Grads]:
        """Losses of all micro-batches, and the gradients after all of them."""
        self.model.zero_grad()
        losses = []
        if order == "each":
            for tokens in self.batches:
                losses.append(self.loss(tokens))
                losses[-1].backward()
        else:
            losses = [self.loss(tokens) for tokens in self.batches]
            backward(losses, order)
        return [loss.item() for loss in losses], gradients(self.model)


def random_routes(like: list[RoutedExperts], seed: int = 5) -> list[RoutedExperts]:
    """Routes that no router of this model would choose, laid out as these."""
    first = like[0]
    rows = [len(routes.ids) for routes in like]
    return outcome.random_routes(rows, first.layers, first.num_experts, first.topk, seed)


def check_foreign_routes(trainer: Trainer, plain: Trainer, order: str, *, drops: bool = False) -> None:
    """Recorded and replayed to the last bit; routes of nobody's choice are shown, and with the recompute of
    `trainer` they give the gradients of `plain`. With `drops` some are lost to a capacity."""
    run = partial(trainer.run, order)
    foreign = random_routes(check_own_record(trainer.model, run))
    outcome.check_foreign_routes(
        trainer.model, run, plain.model, partial(plain.run, order), foreign, drops=drops
    )


def perturbed(model: nn.Module) -> AbstractContextManager[None]:
    """Other router weights for the length of the block."""
    return changed((11 + number, router.module.weight) for number, router in enumerate(routers(model)))


def at_stage(patch: Any, pp: int, pp_rank: int, vp: int | None = None, vp_rank: int | None = None) -> Any:
    """Make this process that pipeline rank, as far as asking Megatron's parallel state goes.

    Returns the pipeline's group, as far as the releases that pass groups around ask it.
    """
    from megatron.core import parallel_state

    group = SimpleNamespace(size=lambda: pp, rank=lambda: pp_rank)
    values = {
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": pp,
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": pp_rank,
        "_PIPELINE_MODEL_PARALLEL_GROUP": group,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": vp,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": vp_rank,
    }
    for name, value in values.items():
        patch.setattr(parallel_state, name, value)
    return group
