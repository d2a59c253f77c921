"""The stacks: a model of each, called alike with token ids [1, rows], and where its experts are chosen."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from npu_replay import routers
from npu_replay.smoke import megatron_model
from zoo import toys
from zoo.outcome import as_map, checkpointed

VOCABULARY = 64
Map = torch.Tensor
"""Bool [rows, experts]: which experts a token goes to."""


@dataclass
class Bed:
    """A model, where its experts are chosen, and how its output is read."""

    model: nn.Module
    call: Callable[[torch.Tensor], torch.Tensor]
    """Gives a loss."""
    layers: list[nn.Module]
    """Which hold a router each, and may be left out."""
    routers: list[nn.Module]
    experts: int = 8
    topk: int = 2
    skipped: Callable[[torch.Tensor], Any] = lambda hidden: hidden
    """What a layer that leaves out its router returns."""
    used: Callable[[Any], Map] | None = None
    """What a router's output sends tokens to; None where the experts tell."""
    changed: Callable[[Any, random.Random], Any] = lambda output, chance: output
    """An output that shows other experts, in some rows."""


def shifted(ids: torch.Tensor, chance: random.Random, experts: int) -> torch.Tensor:
    """Other ids in one row, or in all."""
    rows = slice(None) if chance.random() < 0.5 else slice(chance.randrange(len(ids)), None)
    other = ids.clone()
    other[rows] = (ids[rows] + 1) % experts
    return other


def toy(masked: bool) -> Bed:
    select = toys.in_groups if masked else toys.plain
    model = toys.TokenModel("batch", *(toys.ToyRouter(select=select, masks=masked) for _ in range(3)))

    def changed(output: Any, chance: random.Random) -> Any:
        return output[0], shifted(output[1], chance, toys.EXPERTS)

    return _toy(model, [layer.router for layer in model.body.layers], changed=changed)


def toy_blocks() -> Bed:
    model = toys.TokenModel("batch", *(toys.ToyBlock() for _ in range(3)))
    return _toy(model, [*model.body.layers])


def _toy(model: toys.TokenModel, routers: list[nn.Module], **about: Any) -> Bed:
    layers = [*model.body.layers]
    nn.init.normal_(model.embedding.weight, std=0.5)
    return Bed(
        model, lambda ids: model(ids).square().mean(), layers, routers, toys.EXPERTS, toys.TOPK, **about
    )


def transformers_model(family: str, layers: int = 2) -> Bed:
    pytest.importorskip("transformers")
    from zoo import hugging_face

    model: Any = hugging_face.build(family, num_hidden_layers=layers, use_cache=False)
    modules = [router.module for router in routers.find([model])[0]]

    def changed(output: Any, chance: random.Random) -> Any:
        logits, scores, ids = output
        return logits, scores, shifted(ids, chance, 8)

    return Bed(
        model,
        lambda ids: model(input_ids=ids).logits.square().mean(),
        [layer.mlp for layer in model.model.layers][-len(modules) :],
        modules,
        skipped=(lambda hidden: (hidden, None)) if family == "gpt_oss" else (lambda hidden: hidden),
        used=lambda output: as_map(next(tensor for tensor in output if tensor.dtype == torch.int64), 8),
        changed=changed,
    )


def megatron_gpt(variant: str, **changes: Any) -> Bed:
    from zoo import gpt

    trainer = gpt.build({"num_layers": 2} | gpt.VARIANTS[variant] | changes)
    return _megatron(trainer.model, lambda ids: trainer.loss(ids.to(gpt.DEVICE)))


def megatron_hybrid(pattern: str = "*E*E", **changes: Any) -> Bed:
    from zoo import hybrid

    if why := hybrid.missing(pattern):
        pytest.skip(why)
    model = hybrid.model(hybrid.config(pattern, **changes), pattern)
    return _megatron(model, lambda ids: model(input_ids=ids, labels=ids, **megatron_model.causal(ids)).mean())


def _megatron(model: Any, call: Callable[[torch.Tensor], torch.Tensor]) -> Bed:
    def changed(output: Any, chance: random.Random) -> Any:
        probs, routing_map = output[:2]
        rows = slice(None) if chance.random() < 0.5 else slice(chance.randrange(len(routing_map)), None)
        maps = routing_map.clone()
        weights = probs.clone()
        maps[rows] = routing_map[rows].roll(1, dims=1)
        weights[rows] = probs[rows].roll(1, dims=1)
        return (weights, maps, *output[2:])

    return Bed(
        model,
        call,
        [layer.mlp for layer in model.decoder.layers if hasattr(getattr(layer, "mlp", None), "router")],
        [router.module for router in routers.find([model])[0]],
        skipped=lambda hidden: (hidden, None),
        used=lambda output: output[1].detach().cpu(),
        changed=changed,
    )


BEDS: dict[str, Callable[[], Bed]] = {
    "toy": lambda: toy(masked=False),
    "masked toy": lambda: toy(masked=True),
    "toy blocks": toy_blocks,
    "Qwen3Moe": lambda: transformers_model("qwen3_moe"),
    "Mixtral": lambda: transformers_model("mixtral"),
    "GptOss": lambda: transformers_model("gpt_oss"),
    "DeepseekV3": lambda: transformers_model("deepseek_v3-4-groups", layers=3),
    "megatron": lambda: megatron_gpt("softmax_after_topk"),
    "megatron in groups": lambda: megatron_gpt("groups_sigmoid_bias"),
    "megatron hybrid": megatron_hybrid,
}


@functools.cache
def bed_of(name: str, how: str | None) -> Bed:
    """The model, each of its layers in a checkpoint of this sort."""
    torch.manual_seed(3)
    made = BEDS[name]()
    model: Any = made.model
    if isinstance(model, toys.TokenModel):
        model.body.recompute = how
    elif how is not None:
        lists = (getattr(module, "layers", None) for module in model.modules())
        for layer in next(layers for layers in lists if isinstance(layers, nn.ModuleList)):
            layer.forward = checkpointed(layer.forward, reentrant=how == "reentrant")
    return made
