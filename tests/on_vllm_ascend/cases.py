"""What is tried: one Case is one start of an engine's workers, with a few steps. And what has to come out:
from the maths, which experts a token goes to, and the router's logits that decide it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

LAYERS = 4
EXPERTS = 16
TOP_K = 4
HIDDEN = 64
FEWEST = 8
"""So many tokens have to come into a layer at once, or they aren't held against logits."""
GROUPS = 4
TOP_GROUPS = 2
"""Of the routing with groups."""
BLOCK = 16
"""Tokens in a block of the KV cache."""

REGISTERED = "registered schemes"
"""What a release has of them stands in the results under this name, beside the cases."""


@dataclass(frozen=True)
class Case:
    comm: str = "ALLGATHER"
    scheme: str = ""
    """A quantization scheme as vllm-ascend registers it, and its kind if that isn't `moe`: `FP8/w4a8_moe`."""
    tp: int = 1
    dp: int = 1
    steps: tuple[tuple[int, ...], ...] = ((13,),)
    """The tokens of each data parallel rank, step by step."""
    padding: int = 0
    """Tokens that fill up each step, as for a captured graph."""
    sequence_parallel: bool = False
    eplb: bool = False
    mix_placement: bool = False
    routing: str = "softmax"
    draft: bool = False
    """A draft model whose layer calls itself layer 0 runs after each step."""
    overlap_gate: bool = False
    kv_cache_twice: bool = False
    """It is made to measure graphs with, and then anew, as 0.22.1rc1 does."""
    device: str = "A3"
    """A2, A3, A5 or _310P, which has layers of its own."""
    broken: str = ""
    """How the capture, or a class that it uses, is broken: a function of broken.py."""

    @property
    def dense(self) -> int:
        """The first layers without experts: none with a draft, so that what overwrites layer 0 is seen."""
        return 0 if self.draft else 1

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        """What it has that a plain case hasn't."""
        plain = asdict(Case())
        changes = (f"{name} {value}" for name, value in asdict(self).items() if value != plain[name])
        return re.sub(r"[^\w.+-]+", "_", "-".join(changes)) or "plain"

    @property
    def compared(self) -> int:
        """The layers that are held against logits, over all data-parallel ranks."""
        parts = self.tp if self.sequence_parallel else 1
        longest = [max(of_rank) + self.padding for of_rank in zip(*self.steps, strict=True)]
        return (LAYERS - self.dense) * sum(-(-tokens // parts) >= FEWEST for tokens in longest)


def logits(step: int, layer: int, dp_rank: int, tokens: int) -> NDArray[np.float32]:
    """tokens x experts. Every process draws the same."""
    drawn = np.random.default_rng([17, step, layer, dp_rank]).standard_normal((tokens, EXPERTS))
    return drawn.astype(np.float32)


def bias(layer: int) -> NDArray[np.float32]:
    """What is added to the scores of each expert before the choice, and only there."""
    return np.random.default_rng([5, layer]).uniform(-0.3, 0.3, EXPERTS).astype(np.float32)


def chosen(routing: str, drawn: NDArray[np.float32], layer: int) -> NDArray[np.int64]:
    """The experts that these logits choose: tokens x k, each row sorted."""
    scores = drawn.astype(np.float64)
    if routing == "softmax":  # which is monotonic: the highest logits
        return _highest(scores, TOP_K)
    scores = 1 / (1 + np.exp(-scores)) + bias(layer)
    grouped = scores.reshape(len(scores), GROUPS, -1)
    best_two = np.sort(grouped, -1)[..., -2:].sum(-1)
    kept = np.zeros((len(scores), GROUPS), bool)
    np.put_along_axis(kept, _highest(best_two, TOP_GROUPS), True, 1)
    return _highest(np.where(kept[..., None], grouped, -np.inf).reshape(scores.shape), TOP_K)


def _highest(scores: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    return np.sort(np.argsort(-scores, axis=1)[:, :k], axis=1)
