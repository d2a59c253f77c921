"""The trainer: log-probs and policy updates of a GPTModel over padded micro-batches, full recompute on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

import npu_replay
from npu_replay import RoutedExperts, TokenLayout
from npu_replay.demo import megatron_model
from npu_replay.demo.rollout import PROMPT, Sample
from npu_replay.routes.mismatch import differing_token_layers

MICRO_BATCHES = 2
LEARNING_RATE = 1e-5
CLIP = 0.2


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences, padded to the right, and where their tokens sit in the router's rows."""

    tokens: torch.Tensor
    response: torch.Tensor
    layout: TokenLayout

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> MicroBatch:
        """Pad `samples`; `response` marks the positions whose next token was sampled."""
        lengths = [len(sample.tokens) for sample in samples]
        tokens = torch.zeros(len(samples), max(lengths), dtype=torch.int64)
        response = torch.zeros_like(tokens, dtype=torch.bool)
        for row, sample in enumerate(samples):
            tokens[row, : lengths[row]] = sample.tokens
            response[row, PROMPT - 1 : lengths[row] - 1] = True
        fingerprints = [npu_replay.fingerprint(sample.tokens) for sample in samples]
        layout = TokenLayout.padded(lengths, fingerprints=fingerprints)
        return cls(tokens.to(device), response.to(device), layout)


def micro_batches(samples: Sequence[Sample], device: torch.device) -> list[MicroBatch]:
    """Cut a rollout batch into micro-batches."""
    size = len(samples) // MICRO_BATCHES
    return [MicroBatch.of(samples[i : i + size], device) for i in range(0, len(samples), size)]


def rollout_routes(samples: Sequence[Sample], batches: Sequence[MicroBatch]) -> list[RoutedExperts]:
    """R3: the rollout's routes, laid out in the rows of the trainer's routers."""
    size = len(samples) // len(batches)
    return [
        batch.layout.gather([sample.routes for sample in samples[i * size : (i + 1) * size]])
        for i, batch in enumerate(batches)
    ]


def forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Log-probs of the sampled tokens, float32 [sampled], sequence after sequence."""
    logits = model(input_ids=batch.tokens, **megatron_model.causal(batch.tokens))
    log_probs: torch.Tensor = logits.float().log_softmax(dim=-1)
    following = batch.tokens.roll(-1, dims=1)[..., None]
    return log_probs.gather(2, following)[..., 0][batch.response]


@dataclass(frozen=True)
class Pass:
    """One pass over all micro-batches: what it computed and what its routers showed."""

    log_probs: torch.Tensor
    shown: list[RoutedExperts]


def replaying(model: Any, routes: list[RoutedExperts] | None) -> AbstractContextManager[Any]:
    """A replay of these routes, or nothing."""
    return contextlib.nullcontext() if routes is None else npu_replay.replay(model, routes)


def evaluate(model: Any, batches: Sequence[MicroBatch], routes: list[RoutedExperts] | None) -> Pass:
    """Log-probs without an update."""
    with torch.no_grad(), npu_replay.observe(model) as observation, replaying(model, routes):
        log_probs = torch.cat([forward(model, batch) for batch in batches])
    return Pass(log_probs.cpu(), real_rows(observation.shown, batches))


def old_log_probs(model: Any, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, list[RoutedExperts]]:
    """R2: the trainer's own pass before the update, and the experts that it chose."""
    with torch.no_grad(), npu_replay.record(model) as recording:
        log_probs = torch.cat([forward(model, batch) for batch in batches])
    return log_probs.cpu(), recording.routes


@dataclass
class Steps:
    """What happened over the optimizer steps of one run, one entry a step."""

    flipped: list[int] = field(default_factory=list)
    ratio_min: list[float] = field(default_factory=list)
    ratio_max: list[float] = field(default_factory=list)
    ratio_kl: list[float] = field(default_factory=list)
    token_layers: int = 0


def update(
    model: Any,
    batches: Sequence[MicroBatch],
    old: torch.Tensor,
    routes: list[RoutedExperts] | None,
    steps: int,
    advance: Any,
) -> Steps:
    """Take `steps` clipped policy-gradient steps on one batch, and watch routes and ratio."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    advantages = _advantages(batches)
    history, first = Steps(), None
    for _ in range(steps):
        optimizer.zero_grad()
        with npu_replay.observe(model) as observation, replaying(model, routes):
            passes = _backward(model, batches, old, advantages)
        shown = real_rows(observation.shown, batches)
        first = first or shown
        _note(history, first, shown, npu_replay.compare(old, torch.cat(passes)))
        optimizer.step()
        advance()
    return history


def _backward(
    model: Any, batches: Sequence[MicroBatch], old: torch.Tensor, advantages: list[torch.Tensor]
) -> list[torch.Tensor]:
    """One step's forward and backward over all micro-batches; the log-probs that it saw."""
    passes, start = [], 0
    for batch, advantage in zip(batches, advantages, strict=True):
        log_probs = forward(model, batch)
        before = old[start : start + len(log_probs)].to(log_probs.device)
        start += len(log_probs)
        ratio = (log_probs - before).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() / len(batches)
        loss.backward()  # type: ignore[no-untyped-call]
        passes.append(log_probs.detach().cpu())
    return passes


def _advantages(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Every other sequence was good: +1 and -1 for all tokens of a sequence, in turn."""
    signs = []
    for batch in batches:
        rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
        sign = 1.0 - 2.0 * (rows % 2)
        signs.append(sign[:, None].expand_as(batch.tokens)[batch.response])
    return signs


def _note(history: Steps, first: list[RoutedExperts], shown: list[RoutedExperts], ratio: Any) -> None:
    differing = [differing_token_layers(a, b) for a, b in zip(first, shown, strict=True)]
    history.flipped.append(sum(int(d.sum()) for d in differing))
    history.token_layers = sum(int(a.recorded.sum()) * len(a.layers) for a in first)
    history.ratio_min.append(ratio.ratio_min)
    history.ratio_max.append(ratio.ratio_max)
    history.ratio_kl.append(ratio.kl)


def real_rows(shown: list[RoutedExperts], batches: Sequence[MicroBatch]) -> list[RoutedExperts]:
    """Without padding and without last tokens, whose routes nobody has: only rows that R3 can replay."""
    kept = []
    for routes, batch in zip(shown, batches, strict=True):
        rows = batch.layout.rows
        last = torch.tensor(batch.layout.lengths).cumsum(0) - 1
        counts = (rows >= 0) & ~torch.isin(rows, last)
        kept.append(routes.take(torch.where(counts, torch.arange(len(rows)), -1)))
    return kept
