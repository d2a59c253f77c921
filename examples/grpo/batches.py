"""What the engine sampled becomes mini-batches.

Tokens, rewards, advantages, and the engine's routes in the rows of the trainer's routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import task
import torch
from policies import Policy
from settings import Settings

import npu_replay
from examples.qwen3_moe.sample import Sample
from npu_replay import RoutedExperts


@dataclass(frozen=True)
class Batch:
    """A mini-batch, padded to the right; what has one value a sampled token goes sequence after sequence.

    Attributes:
        tokens: int64 [sequences, longest].
        sampled: bool, as tokens: the next token was sampled.
        rollout: float32 [sampled], the engine's log-probs.
        advantages: float32 [sampled].
        routes: the engine's, in the rows of the trainer's routers.
    """

    tokens: torch.Tensor
    sampled: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    routes: RoutedExperts

    @classmethod
    def of(cls, samples: Sequence[Sample], advantages: torch.Tensor, policy: Policy) -> Batch:
        lengths = [len(sample.tokens) for sample in samples]
        sampled = torch.zeros(len(samples), max(lengths), dtype=torch.bool)
        for row, sample in enumerate(samples):
            sampled[row, sample.prompt - 1 : lengths[row] - 1] = True
        layout = policy.layout(lengths, [npu_replay.fingerprint(sample.tokens) for sample in samples])
        return cls(
            torch.nn.utils.rnn.pad_sequence([sample.tokens for sample in samples], batch_first=True),
            sampled,
            torch.cat([sample.log_probs for sample in samples]),
            advantages.repeat_interleave(sampled.sum(dim=1)),
            layout.gather([sample.routes for sample in samples]),
        )


def mini_batches(
    samples: list[Sample], policy: Policy, settings: Settings, seed: int
) -> tuple[list[Batch], torch.Tensor]:
    """Shuffled, with advantages: a reward against the mean of its group, in its standard deviations."""
    rewards = scores(samples)
    groups = rewards.view(-1, settings.group)
    spread = groups.std(dim=1, keepdim=True) + 1e-6
    advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).flatten()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    parts = order.chunk(settings.mini_batches)
    return [Batch.of([samples[i] for i in part], advantages[part], policy) for part in parts], rewards


def scores(samples: Sequence[Sample]) -> torch.Tensor:
    """The reward of each sample, float32."""
    split = [
        (sample.tokens[: sample.prompt].tolist(), sample.tokens[sample.prompt :].tolist())
        for sample in samples
    ]
    return torch.tensor([task.reward(*pair) for pair in split])
