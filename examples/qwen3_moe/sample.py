"""One sequence of a rollout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_replay import RoutedExperts


@dataclass(frozen=True)
class Sample:
    """One sequence of a rollout.

    Attributes:
        tokens: int64 [length], prompt and response.
        prompt: how many of them are the prompt.
        log_probs: float32 [length - prompt], of the sampled tokens, in nats.
        routes: of all tokens, or of all but the last, which was never fed to the model.
    """

    tokens: torch.Tensor
    prompt: int
    log_probs: torch.Tensor
    routes: RoutedExperts
