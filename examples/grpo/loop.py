"""GRPO with a live rollout engine, and routing replay in it: take what you need.

One step: the engine samples groups of answers, the trainer works out its own log-probs of them, takes one
optimizer step on each mini-batch, and hands its weights to the engine. Replay is three lines of it: `replay`
or `record` around the old log-probs, `replay` around each update. `observe` only measures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import task
import torch
from policies import Policy
from roads import Answer, together

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.demo.rollout import Sample


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Attributes:
        replay: "R2", "R3" or "".
        tis: truncated importance sampling between engine and trainer.
    """

    replay: str = ""
    tis: bool = False


ARMS = {
    "none": Arm(),
    "R2": Arm("R2"),
    "R3": Arm("R3"),
    "TIS": Arm(tis=True),
    "TIS+R3": Arm("R3", tis=True),
}


@dataclass(frozen=True)
class Settings:
    """How a run goes.

    Attributes:
        prompts, mini_batches: of one step, over all ranks.
        group: answers to a prompt.
        truncation: the most that truncated importance sampling weighs a token with.
        longest: digits of a prompt, at most.
        rollout_bits: of the mantissa of the engine's weights: 7 is bfloat16, less is coarser.
    """

    steps: int = 40
    prompts: int = 32
    group: int = 8
    mini_batches: int = 4
    learning_rate: float = 1e-4
    clip: float = 0.2
    truncation: float = 2.0
    longest: int = 10
    evaluate_every: int = 5
    evaluated: int = 256
    rollout_bits: int = 7


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


def train(
    policy: Policy, road: Answer, arm: Arm, settings: Settings, seed: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Run it; gives the figures of each step.

    Args:
        road: how this rank gets its samples, and the engine its weights.
        folder: where the weights travel through.
    """
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4 * settings.mini_batches)
    policy.save(folder, settings.rollout_bits)
    road.load(folder)
    for step in range(settings.steps):
        seconds: dict[str, float] = {}
        with timed(seconds, "rollout"):
            prompts = task.prompts(settings.prompts, seed * 10_000 + step, settings.longest)
            samples = road.sample(prompts, settings.group)
        versions = {sample.routes.weight_version for sample in samples}
        if versions != {step + 1}:
            raise RuntimeError(f"step {step} wants samples of weights {step + 1}, and got {versions}")
        batches, rewards = mini_batches(samples, policy, settings, seed + step)

        with timed(seconds, "old log-probs"):
            old, entropy, routes, shown = old_log_probs(policy, batches, arm)
        wrong = figures.mismatch(batches, shown)
        updates = []
        with timed(seconds, "update"):
            for number, (batch, before) in enumerate(zip(batches, old, strict=True)):
                given = [] if routes is None else [routes[number]]
                updates.append(update(policy, optimizer, batch, before, given, arm, settings))
                warm_up.step()
        with timed(seconds, "weights"):
            policy.save(folder, settings.rollout_bits)
            road.load(folder)
        row = figures.row(step, rewards, batches, old, entropy, updates, settings.clip)
        row |= {
            "router_mismatch": wrong,
            "update_mismatch": figures.mismatch(batches, [u.shown for u in updates]),
        }
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            with timed(seconds, "evaluation"):
                held_out = task.prompts(settings.evaluated, 77, settings.longest)
                row["accuracy"] = float(scores(road.sample(held_out, 1, temperature=0.0)).mean())
        yield row | {f"seconds, {part}": spent for part, spent in seconds.items()}


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
    return torch.tensor([task.reward(*one) for one in split])


def old_log_probs(
    policy: Policy, batches: list[Batch], arm: Arm
) -> tuple[list[torch.Tensor], torch.Tensor, list[RoutedExperts] | None, list[RoutedExperts]]:
    """The trainer's log-probs before the update, the entropy, what to replay, and what the routers showed."""
    block: AbstractContextManager[Any] = contextlib.nullcontext()
    if arm.replay == "R2":
        block = npu_replay.record(policy.model)
    if arm.replay == "R3":
        block = npu_replay.replay(policy.model, [batch.routes for batch in batches])
    with torch.no_grad(), npu_replay.observe(policy.model) as observation, block as opened:
        passes = [log_probs(policy, batch) for batch in batches]
    routes = (
        opened.routes if arm.replay == "R2" else [batch.routes for batch in batches] if arm.replay else None
    )
    return (
        [one for one, _ in passes],
        torch.cat([entropy for _, entropy in passes]),
        routes,
        observation.shown,
    )


@dataclass(frozen=True)
class Update:
    """What one optimizer step showed: log-ratios to the old log-probs, the gradient's norm, the routers."""

    log_ratio: torch.Tensor
    gradient: float
    shown: RoutedExperts


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    old: torch.Tensor,
    routes: list[RoutedExperts],
    arm: Arm,
    settings: Settings,
) -> Update:
    """One optimizer step on one mini-batch."""
    block = npu_replay.replay(policy.model, routes) if routes else contextlib.nullcontext()
    with npu_replay.observe(policy.model) as observation, block:
        now, _ = log_probs(policy, batch)
        ratio = (now - old).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        if arm.tis:
            gain = gain * (old - batch.rollout).exp().clamp(max=settings.truncation)
        # Every rank's gradient is averaged, and each sampled token counts the same.
        (-gain.sum() / together([len(gain)]).float().mean()).backward()
    gradient = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return Update(
        (now - old).detach(),
        float(getattr(gradient, "full_tensor", lambda: gradient)()),
        observation.shown[0],
    )


def log_probs(policy: Policy, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens, and the entropy there, float32 [sampled], in nats."""
    every = policy.logits(batch.tokens).float().log_softmax(dim=-1)[batch.sampled]
    following = batch.tokens.roll(-1, dims=1)[batch.sampled]
    return every.gather(1, following[:, None])[:, 0], -(every.exp() * every).sum(dim=1).detach()


@contextlib.contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - started
