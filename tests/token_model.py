"""A toy model that is called with token ids, [batch, sequence], whose routers' rows have either order."""

from __future__ import annotations

import torch
from torch import nn

from toys import HIDDEN, ToyModel, ToyRouter


class TokenModel(nn.Module):
    """Embeds token ids, and runs the toy layers on rows that are batch-major or sequence-major."""

    def __init__(self, order: str, layers: int = 2) -> None:
        super().__init__()
        self.order = order
        self.body = ToyModel(*(ToyRouter(number, row_order=order) for number in range(layers)))
        self.embedding = nn.Embedding(64, HIDDEN)

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
