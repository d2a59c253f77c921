"""What the routers of a small Qwen3-MoE choose in each pass of a trainer's run, read by hooks of our own.

Nothing of npu_replay is used here: this is the truth that its replay is held against.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import torch


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How many tokens have other experts; both are sorted."""
    return int((ours != theirs).any(1).sum())


class Passes:
    """A run's passes.

    Attributes:
        count: calls of the model, by kind: "generation", "reference", "evaluation", "record" (the old
            log-probs) and "update".
        recorded: by sequence (its tokens) and layer what the newest record chose, sorted, [tokens, topk].
        updates, otherwise: token-layers of updates and their recomputes; those with other experts than the
            record of their sequence.
        recomputed: calls of routers inside the backward of an update.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.count: Counter[str] = Counter()
        self.recorded: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        self.updates = self.otherwise = self.recomputed = 0
        self._tuners: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
        inner: Any = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeForCausalLM")
        # generate() goes past PeftModel, and PeftModel past the __call__ of what is in it.
        for module in {model, inner}:
            module.register_forward_pre_hook(self._begins, with_kwargs=True)
        for layer, block in enumerate(inner.model.layers):
            block.mlp.gate.register_forward_hook(partial(self._routed, layer))

    def chose(self, layer: int, tokens: tuple[int, ...], chosen: torch.Tensor, live: torch.Tensor) -> None:
        """What a router chose for a sequence, and what its scores say; for a subclass."""

    def _begins(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):  # 5.24 says cache
            self.kind = "generation"
        elif self._tuners and self._tuners[0].disable_adapters:
            self.kind = "reference"
        elif not module.training:
            self.kind = "evaluation"
        else:
            self.kind = "update" if torch.is_grad_enabled() else "record"
        self.count[self.kind] += 1
        places = torch.arange(ids.numel()).view_as(ids)
        if self.kind == "generation":
            rows = []
        elif ids.shape[0] == 1 and positions is not None and int((positions == 0).sum()) > 1:
            starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), ids.numel()]
            rows = [(ids[0, a:b], places[0, a:b]) for a, b in pairwise(starts)]
        else:
            kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
            rows = [(tokens[keep], at[keep]) for tokens, at, keep in zip(ids, places, kept, strict=True)]
        self._rows = [(tuple(tokens.tolist()), at) for tokens, at in rows if len(tokens) > 1]

    def _routed(self, layer: int, gate: Any, args: Any, out: Any) -> None:
        ids = next(tensor for tensor in out if tensor.dtype == torch.int64).detach()
        hidden = args[0].detach().reshape(-1, args[0].shape[-1])
        live = torch.nn.functional.linear(hidden, gate.weight).topk(ids.shape[1]).indices
        self.recomputed += self.kind == "update" and torch._C._current_graph_task_id() != -1
        for tokens, at in self._rows:
            chosen = ids[at].sort(1).values
            recorded = self.recorded.setdefault(tokens, {})
            if self.kind == "record":
                recorded[layer] = chosen
            elif self.kind == "update" and layer in recorded:
                self.updates += len(at)
                self.otherwise += differing(chosen, recorded[layer])
            self.chose(layer, tokens, chosen, live[at].sort(1).values)
