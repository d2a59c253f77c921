"""How the pattern of Megatron's HybridModel is read: each of its symbols is one of Megatron's layers.

`-` is a dense MLP, `E` has experts, any other is a mixer; `|` ends a stage, and `/` the decoder.
"""

from __future__ import annotations

import re


def stages(pattern: str) -> list[str]:
    """The symbols of each pipeline stage, virtual ones too, in order; all in one where no `|` ends them."""
    return pattern.partition("/")[0].split("|")


def labels(pattern: str) -> list[int | None]:
    """The decoder layer that each symbol is or completes, as a Hugging Face config counts; None for the mixer
    of a block.

    Two symbols are a block where each `-` and `E` has a mixer of its own. In other patterns each symbol is a
    layer, as in Nemotron's configs.

    >>> from npu_replay.parallel import hybrid_pattern
    >>> hybrid_pattern.labels("*-*E"), hybrid_pattern.labels("MEM*E")
    ([None, 0, None, 1], [0, 1, 2, 3, 4])
    """
    symbols = "".join(stages(pattern))
    if re.fullmatch("([^-E][-E])+", symbols):
        return [place // 2 if place % 2 else None for place in range(len(symbols))]
    return [*range(len(symbols))]


def kinds(pattern: str) -> list[int]:
    """For each decoder layer 1 if it has experts, else 0, as moe_layer_freq has it."""
    named = zip("".join(stages(pattern)), labels(pattern), strict=True)
    return [int(symbol == "E") for symbol, label in named if label is not None]
