"""What is compared, and how a run goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One way to train.

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
    """Of a run, for all its arms and seeds.

    Attributes:
        prompts, mini_batches: of one step, over all ranks.
        group: answers to a prompt.
        clip: how far a ratio counts.
        truncation: the most that truncated importance sampling weighs a token with.
        longest: digits of a prompt, at most.
        evaluate_every: steps; the last is evaluated too, on `evaluated` prompts.
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
