"""The trainer: log-probs and policy updates of a GPTModel over padded micro-batches, full recompute on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import npu_replay
from examples.qwen3_moe.sample import Sample
from npu_replay import RoutedExperts, TokenLayout
from npu_replay.smoke import megatron_model

MICRO_BATCHES = 2
LEARNING_RATE = 1e-5
CLIP = 0.2


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences, padded to the right.

    Attributes:
        tokens: int64 [sequences, longest].
        response: bool, where the next token was sampled.
        routes: R3, the rollout's, in the rows of the trainer's routers; padding and last tokens have none.
    """

    tokens: torch.Tensor
    response: torch.Tensor
    routes: RoutedExperts

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> MicroBatch:
        """Pad `samples`."""
        lengths = [len(sample.tokens) for sample in samples]
        tokens = torch.zeros(len(samples), max(lengths), dtype=torch.int64)
        response = torch.zeros_like(tokens, dtype=torch.bool)
        for row, sample in enumerate(samples):
            tokens[row, : lengths[row]] = sample.tokens
            response[row, sample.prompt - 1 : lengths[row] - 1] = True
        fingerprints = [npu_replay.fingerprint(sample.tokens) for sample in samples]
        layout = TokenLayout.padded(lengths, fingerprints=fingerprints)
        routes = layout.gather([sample.routes for sample in samples])
        return cls(tokens.to(device), response.to(device), routes)

    @property
    def advantages(self) -> torch.Tensor:
        """Every other sequence was good: +1 and -1 for all sampled tokens of a sequence, in turn."""
        return 1.0 - 2.0 * (self.response.nonzero()[:, 0] % 2)

    def with_routes(self, shown: RoutedExperts) -> RoutedExperts:
        """Only the rows that R3 can replay."""
        return shown.take(torch.where(self.routes.recorded, torch.arange(len(shown)), -1))


Routes = list[RoutedExperts] | None
"""One a micro-batch, to replay; or none."""


class Trainer:
    """A model and one batch of rollout, cut into micro-batches."""

    def __init__(self, model: Any, samples: Sequence[Sample], device: torch.device) -> None:
        self.model = model
        size = len(samples) // MICRO_BATCHES
        cuts = range(0, len(samples), size)
        self.batches = [MicroBatch.of(samples[cut : cut + size], device) for cut in cuts]
        self.rollout_routes = [batch.routes for batch in self.batches]

    def evaluate(self, routes: Routes) -> tuple[torch.Tensor, list[RoutedExperts]]:
        """Log-probs without an update, and what the routers showed."""
        with torch.no_grad():
            return self._watched(lambda: torch.cat(list(map(self._log_probs, self.batches))).cpu(), routes)

    def old_log_probs(self) -> tuple[torch.Tensor, list[RoutedExperts]]:
        """R2: the trainer's own pass before the update, and the experts that it chose."""
        with torch.no_grad(), npu_replay.record(self.model) as recording:
            log_probs = torch.cat(list(map(self._log_probs, self.batches)))
        return log_probs.cpu(), recording.routes

    def update(self, old: torch.Tensor, routes: Routes, steps: int) -> dict[str, Any]:
        """Take clipped policy-gradient steps on the batch; what happened to routes and ratio at each.

        Args:
            old: the log-probs before the first step, float32 [sampled].
        """
        optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        rows, first = [], None
        for _ in range(steps):
            optimizer.zero_grad()
            log_probs, shown = self._watched(lambda: self._backward(old), routes)
            first = first or shown
            flips, ratio = npu_replay.compare(first, shown), npu_replay.compare(old, log_probs)
            rows.append((flips.differing, ratio.ratio_min, ratio.ratio_max, ratio.kl))
            optimizer.step()
        columns = zip(("flipped", "ratio_min", "ratio_max", "ratio_kl"), zip(*rows, strict=True), strict=True)
        return {name: list(column) for name, column in columns} | {"token_layers": flips.token_layers}

    def _watched(
        self, work: Callable[[], torch.Tensor], routes: Routes
    ) -> tuple[torch.Tensor, list[RoutedExperts]]:
        """The result of `work` under these routes, and what the routers showed meanwhile."""
        block: AbstractContextManager[Any] = contextlib.nullcontext()
        if routes is not None:
            block = npu_replay.replay(self.model, routes)
        with npu_replay.observe(self.model) as observation, block:
            result = work()
        shown = zip(self.batches, observation.shown, strict=True)
        return result, [batch.with_routes(routes) for batch, routes in shown]

    def _log_probs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs of the sampled tokens, float32 [sampled], sequence after sequence."""
        logits = self.model(input_ids=batch.tokens, **megatron_model.causal(batch.tokens))
        log_probs: torch.Tensor = logits.float().log_softmax(dim=-1)
        following = batch.tokens.roll(-1, dims=1)[..., None]
        return log_probs.gather(2, following)[..., 0][batch.response]

    def _backward(self, old: torch.Tensor) -> torch.Tensor:
        """One step's forward and backward over all micro-batches; the log-probs that it saw."""
        passes = []
        counts = [int(batch.response.sum()) for batch in self.batches]
        for batch, before in zip(self.batches, torch.split(old, counts), strict=True):
            log_probs = self._log_probs(batch)
            ratio = (log_probs - before.to(log_probs.device)).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
            (-gain / len(self.batches)).backward()  # type: ignore[no-untyped-call]
            passes.append(log_probs.detach().cpu())
        return torch.cat(passes)
