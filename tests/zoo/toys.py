"""A small model with routers in plain torch, for what doesn't need a product."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.routers import Router, RouterKind
from zoo.outcome import gradients, random_routes
from zoo.outcome import hooks as hooks
from zoo.outcome import same as same

HIDDEN = 8
EXPERTS = 16
TOPK = 3
ROWS = 10

_HOLDS_ITS_GENERATOR = "gen" in inspect.unwrap(checkpoint).__code__.co_varnames
SAVED_TENSOR_HOOKS = ["hooks told", *(["hooks not told"] if _HOLDS_ITS_GENERATOR else [])]
"""torch 2.7 doesn't tell them, and a generator of `checkpoint`'s tells the region; 2.15 has it elsewhere."""

Select = Callable[["ToyRouter", torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def plain(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(scores, router.topk, dim=-1)


class ToyRouter(nn.Module):
    """Softmax scores, a top-k, and (values, ids) as output; `select` takes the place of the top-k."""

    def __init__(self, layer: int | None = None, select: Select = plain, **about: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.layer = layer
        self.topk = TOPK
        self.select = select
        self.about = about

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (hidden.reshape(-1, HIDDEN) @ self.weight.T).softmax(dim=-1)
        return self.select(self, scores)


class ToyLayer(nn.Module):
    """A router and its experts, each of which scales and turns its tokens its own way.

    `taken` is given the ids that the experts get.
    """

    def __init__(self, router: ToyRouter) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.3)
        self.taken = nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values, ids = self.router(hidden)
        ids = self.taken(ids)
        mixed = torch.einsum("tk,tkhg,th->tg", values, self.experts[ids], hidden)
        return hidden + mixed.tanh()


class ToyModel(nn.Module):
    """Layers with these routers, or these layers; `recompute` checkpoints each of them: "reentrant" or
    "non-reentrant"."""

    def __init__(self, *parts: nn.Module, recompute: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        parts = parts or (ToyRouter(), ToyRouter())
        self.layers = nn.ModuleList(ToyLayer(part) if isinstance(part, ToyRouter) else part for part in parts)
        self.recompute = recompute
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.recompute == "reentrant")
        return hidden


class ToyRouters(RouterKind):
    """The RouterKind of ToyRouter."""

    def describe(self, module: nn.Module, path: str) -> Router | None:
        if not isinstance(module, ToyRouter):
            return None
        values = {"masks": False, "layer": module.layer} | module.about
        return Router(module=module, num_experts=EXPERTS, topk=module.topk, shows=shows, **values)


class ToyBlock(nn.Module):
    """Scores, a top-k and experts in one module, whose output shows no ids."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))
        self.taken = nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values, ids = torch.topk((hidden @ self.weight.T).softmax(dim=-1), TOPK, dim=-1)
        ids = self.taken(ids)
        return hidden + torch.einsum("tk,tkhg,th->tg", values, self.experts[ids], hidden).tanh()


class ToyBlocks(RouterKind):
    """The RouterKind of ToyBlock."""

    def describe(self, module: nn.Module, path: str) -> Router | None:
        if not isinstance(module, ToyBlock):
            return None
        return Router(module=module, num_experts=EXPERTS, topk=TOPK, shows=None, masks=False)


def outside_groups(scores: torch.Tensor) -> torch.Tensor:
    """Bool [rows, experts]: outside of the best two of four groups. It calls no top-k."""
    best = scores.view(len(scores), 4, -1).amax(dim=2).argsort(dim=1, descending=True)[:, :2]
    out = torch.ones(len(scores), 4, dtype=torch.bool).scatter(1, best, False)
    return out.repeat_interleave(EXPERTS // 4, dim=1)


def in_groups(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return plain(router, scores.masked_fill(outside_groups(scores), float("-inf")))


def shows(output: object) -> torch.Tensor:
    ids = output[1]
    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool, device=ids.device).scatter(1, ids, True)


def tokens(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=False)


def foreign(
    count: int = 1,
    *,
    layers: int | Sequence[int] = 2,
    rows: int = ROWS,
    recorded: torch.Tensor | None = None,
    seed: int = 5,
) -> list[RoutedExperts]:
    """Routes of so many micro-batches that no router here would choose; `layers`: how many, or which."""
    layers = range(layers) if isinstance(layers, int) else layers
    return random_routes([rows] * count, layers, EXPERTS, TOPK, seed, recorded=recorded)


def opened(kind: str, model: nn.Module, count: int = 1, **of_routes: Any) -> Any:
    """A block of this kind; the routes of a replay, of so many micro-batches, are foreign."""
    if kind == "replay":
        return npu_replay.replay(model, foreign(count, layers=len(model.layers), **of_routes))
    return getattr(npu_replay, kind)(model)


def forwards(model: nn.Module, *seeds: int) -> None:
    """One forward for each micro-batch."""
    for seed in seeds:
        model(tokens(seed))


def recorded(model: nn.Module, *seeds: int) -> list[RoutedExperts]:
    """What the model's own routers choose."""
    with torch.no_grad(), npu_replay.record(model) as recording:
        forwards(model, *(seeds or (0,)))
    return recording.routes


def run(model: nn.Module, *seeds: int) -> tuple[float, list[torch.Tensor | None]]:
    """One backward over the sum of the micro-batches' losses; the loss and every gradient."""
    model.zero_grad()
    loss = sum(model(tokens(seed).requires_grad_()).square().mean() for seed in seeds or (0,))
    loss.backward()
    return loss.item(), gradients(model)


class TokenModel(nn.Module):
    """Embeds token ids, and runs the toy layers on rows that are batch-major or sequence-major."""

    def __init__(self, order: str, *parts: nn.Module) -> None:
        super().__init__()
        self.order = order
        self.body = ToyModel(*(parts or (ToyRouter(number, row_order=order) for number in range(2))))
        self.embedding = nn.Embedding(64, HIDDEN)
        self.config = SimpleNamespace(num_hidden_layers=len(parts), get_text_config=lambda: self.config)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        rows = hidden if self.order == "batch" else hidden.transpose(0, 1)
        return self.body(rows.reshape(-1, HIDDEN))


def token_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(seed))
