"""The policy in training: Megatron-core with full recompute, or transformers under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu_replay import TokenLayout


class Policy:
    """What the loop needs of a trainer.

    Attributes:
        model: what the loop calls, and what npu_replay opens its blocks on.
        order: how the rows of a batch lie in its routers, as in `TokenLayout.padded`.
    """

    model: Any
    order: Any

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.like = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length, vocabulary], of right-padded tokens."""
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        """All weights by transformers' names, on rank 0."""
        raise NotImplementedError

    def layout(self, lengths: list[int], fingerprints: list[int]) -> TokenLayout:
        """Which token sits in which row of the routers."""
        return TokenLayout.padded(lengths, order=self.order, fingerprints=fingerprints)

    def save(self, folder: Path, bits: int) -> None:
        """Write a checkpoint for the engine, in bfloat16 with so many bits of mantissa (7 are all)."""
        state = self.state()
        if not dist.get_rank():
            self.like.load_state_dict(state)
            rounded = {name: coarse(value, bits).bfloat16() for name, value in state.items()}
            self.like.save_pretrained(folder, state_dict=rounded)
        dist.barrier()


class Megatron(Policy):
    """A GPTModel in float32 with full recompute."""

    order = "sequence"

    def __init__(self, folder: Path) -> None:
        from examples.qwen3_moe import weights
        from npu_replay.smoke import megatron_model

        super().__init__(folder)
        megatron_model.start(torch.device("cpu"))
        self.model = weights.like(self.like, torch.device("cpu"))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        from npu_replay.smoke.megatron_model import causal

        result: torch.Tensor = self.model(input_ids=tokens, **causal(tokens))
        return result

    def state(self) -> dict[str, torch.Tensor]:
        from examples.qwen3_moe import weights

        return weights.to_transformers(self.model.state_dict(), self.like.config)


class Fsdp(Policy):
    """transformers' own model, sharded over all processes layer by layer, with checkpointed layers."""

    order = "batch"

    def __init__(self, folder: Path) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import Qwen3MoeForCausalLM

        super().__init__(folder)
        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()  # transformers recomputes nothing in eval; there is no dropout
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(tokens, use_cache=False).logits
        return result

    def state(self) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, torch.Tensor] = get_model_state_dict(self.model, options=options)
        return state


def coarse(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest numbers with so many bits of mantissa: a rollout in a format of fewer bits, simulated."""
    mantissa, exponent = torch.frexp(weight)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)
