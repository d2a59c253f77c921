"""GRPO with a live rollout engine, and routing replay in it: take what you need.

One step: the engine samples groups of answers, the trainer works out its own log-probs of them, takes one
optimizer step on each mini-batch, and hands its weights to the engine. Replay is two blocks of it: `record`
or `replay` around the old log-probs, `replay` around each update. `observe` only measures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import figures
import task
import torch
from batches import Batch, mini_batches, scores
from policies import Policy
from roads import Answer, together
from settings import Arm, Settings

import npu_replay
from npu_replay import RoutedExperts


class Old(NamedTuple):
    """What the trainer's pass before the update gives, of each mini-batch."""

    log_probs: list[torch.Tensor]
    entropy: list[torch.Tensor]
    routes: list[RoutedExperts | None]
    """To replay in the update."""
    shown: list[RoutedExperts]
    """What the routers showed."""


class Update(NamedTuple):
    """What one optimizer step shows: log-ratios to the old log-probs, float32 [sampled], and the routers."""

    log_ratio: torch.Tensor
    gradient_norm: float
    shown: RoutedExperts


class Grpo:
    """One run.

    Args:
        road: how this rank gets its samples, and the engine its weights.
        folder: where the weights travel through.
    """

    def __init__(
        self, policy: Policy, road: Answer, arm: Arm, settings: Settings, seed: int, folder: Path
    ) -> None:
        self.policy, self.road, self.arm, self.settings = policy, road, arm, settings
        self.seed, self.folder = seed, folder
        weights = policy.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, settings.learning_rate, (0.9, 0.95), weight_decay=0.0)
        self.warm_up = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 0.1, total_iters=4 * settings.mini_batches
        )
        self.seconds: dict[str, float] = {}

    def steps(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """The figures of each step, from this one on."""
        self._hand_over()
        for number in range(first, self.settings.steps):
            self.seconds.clear()
            row = self._step(number)
            yield row | {f"seconds, {part}": spent for part, spent in self.seconds.items()}

    def state(self) -> list[Any]:
        """All that goes on from a checkpoint: model, optimizer and learning rate."""
        return [self.policy.model, self.optimizer, self.warm_up]

    def _step(self, number: int) -> dict[str, Any]:
        settings = self.settings
        with self._timed("rollout"):
            prompts = task.prompts(settings.prompts, self.seed * 10_000 + number, settings.longest)
            samples = self.road.sample(prompts, settings.group)
        versions = {sample.routes.weight_version for sample in samples}
        if versions != {self.version}:
            raise RuntimeError(f"step {number}: samples of weights {self.version} are wanted, got {versions}")
        batches, rewards = mini_batches(samples, self.policy, settings, self.seed + number)
        with self._timed("old log-probs"):
            old = self._old(batches)
        with self._timed("update"):
            updates = [self._update(*args) for args in zip(batches, old.log_probs, old.routes, strict=True)]
        with self._timed("weights"):
            self._hand_over()
        row = figures.row(number, rewards, batches, old, updates, settings.clip)
        if (number + 1) % settings.evaluate_every == 0 or number + 1 == settings.steps:
            with self._timed("evaluation"):
                held_out = task.prompts(settings.evaluated, 77, settings.longest)
                row["accuracy"] = float(together(scores(self.road.sample(held_out, 1, 0.0))).mean())
        return row

    def _old(self, batches: list[Batch]) -> Old:
        model, rollout_routes = self.policy.model, [batch.routes for batch in batches]
        block: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.arm.replay == "R2":
            block = npu_replay.record(model)
        if self.arm.replay == "R3":
            block = npu_replay.replay(model, rollout_routes)
        with torch.no_grad(), npu_replay.observe(model) as observation, block as recording:
            log_probs, entropy = zip(*map(self._log_probs, batches), strict=True)
        replayed: Any = {"R2": lambda: recording.routes, "R3": lambda: rollout_routes}
        routes = replayed.get(self.arm.replay, lambda: [None] * len(batches))()
        return Old(list(log_probs), list(entropy), routes, observation.shown)

    def _update(self, batch: Batch, old: torch.Tensor, routes: RoutedExperts | None) -> Update:
        """One optimizer step on one mini-batch."""
        model, clip = self.policy.model, self.settings.clip
        block: AbstractContextManager[Any] = contextlib.nullcontext()
        if routes is not None:
            block = npu_replay.replay(model, [routes])
        with npu_replay.observe(model) as observation, block:
            now, _ = self._log_probs(batch)
            ratio = (now - old).exp()
            gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - clip, 1 + clip) * batch.advantages)
            if self.arm.tis:
                gain = gain * (old - batch.rollout).exp().clamp(max=self.settings.truncation)
            # The ranks' gradients are averaged, and each sampled token is to count the same.
            (-gain.sum() / together([len(gain)]).float().mean()).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.warm_up.step()
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2's is in parts
        return Update((now - old).detach(), float(whole), observation.shown[0])

    def _log_probs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the sampled tokens, and the entropy there, float32 [sampled], in nats."""
        every = self.policy.logits(batch.tokens).float().log_softmax(dim=-1)[batch.sampled]
        following = batch.tokens.roll(-1, dims=1)[batch.sampled]
        return every.gather(1, following[:, None])[:, 0], -(every.exp() * every).sum(dim=1).detach()

    def _hand_over(self) -> None:
        self.policy.save(self.folder, self.settings.rollout_bits)
        self.version = self.road.load(self.folder)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - started
