"""Which experts a token has to be given, from the maths, and the router's logits that decide it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from on_vllm_ascend.cases import EXPERTS, GROUPS, TOP_GROUPS, TOP_K


def logits(step: int, layer: int, dp_rank: int, tokens: int) -> NDArray[np.float32]:
    """tokens x experts. Every process draws the same."""
    drawn = np.random.default_rng([17, step, layer, dp_rank]).standard_normal((tokens, EXPERTS))
    return drawn.astype(np.float32)


def bias(layer: int) -> NDArray[np.float32]:
    """What is added to the scores of each expert before the choice, and only there."""
    return np.random.default_rng([5, layer]).uniform(-0.3, 0.3, EXPERTS).astype(np.float32)


def experts(routing: str, drawn: NDArray[np.float32], layer: int) -> NDArray[np.int64]:
    """tokens x k, each row sorted."""
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
