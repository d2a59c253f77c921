"""Finds the layout of a caller's preprocessing by passing token numbers through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from npu_replay.errors import MicroBatchError, shown

Preprocessing: TypeAlias = Callable[[list[torch.Tensor]], Any]
"""Maps one int64 tensor per sequence to the input of this rank's model."""

_FIRST_NUMBER = 1 << 24
"""The first token number: above any vocabulary's ids, so that a padding id isn't taken for one, and small
enough for a billion tokens in int32."""


def places(
    fn: Preprocessing, sizes: tuple[int, ...], *, tokens: Sequence[Any] | None, padding_alone: bool
) -> torch.Tensor:
    """Return the packed token in each place of what `fn` returns, [rows] or [batch, sequence], or -1.

    `fn` is called twice with different numbers, and once with `tokens`, the real ids, if they are given. With
    `padding_alone` this rank may have nothing but padding.
    """
    once, again = (_probed(fn, sizes, padding_alone, turned) for turned in (False, True))
    MicroBatchError.unless(
        torch.equal(once, again),
        "the preprocessing puts the same tokens into other rows the second time",
        "a layout that depends on the lengths alone",
        f"shape {list(once.shape)}, then {list(again.shape)}",
        "a shuffle, or code that looks at the token ids (sorting, a hash)",
    )
    if tokens is None:
        return once
    real = [
        torch.as_tensor(sequence, device="cpu").detach().to(torch.int64).reshape(-1) for sequence in tokens
    ]
    lengths = tuple(map(len, real))
    MicroBatchError.unless(lengths == sizes, "tokens and lengths differ", sizes, lengths)
    made = _fed(fn, [sequence.clone() for sequence in real])
    filled = once >= 0
    MicroBatchError.unless(
        made.shape == once.shape and torch.equal(made[filled], torch.cat(real)[once[filled]]),
        "the preprocessing puts the real token ids into other rows than the numbers in their place",
        "a layout that depends on the lengths alone",
        f"shape {list(made.shape)} for {list(once.shape)}, or other ids in its rows",
        "code that treats some ids apart (a mask of ids != pad, with pad inside the text)",
    )
    return once


def _probed(fn: Preprocessing, sizes: tuple[int, ...], padding_alone: bool, turned: bool) -> torch.Tensor:
    """Return the packed token in each place of what `fn` returns. `turned` counts the numbers backwards."""
    tokens = sum(sizes)
    last = _FIRST_NUMBER + 2 * tokens + 9  # odd for a token whose first number is even
    # Turned, each token has another number, so code that looks at the ids lays them out differently.
    numbers = torch.arange(tokens, device="cpu")
    numbers = last - numbers if turned else _FIRST_NUMBER + numbers
    made = _fed(fn, list(torch.split(numbers, list(sizes))))
    token_numbers = last - made if turned else made - _FIRST_NUMBER
    token_numbers = torch.where((token_numbers >= 0) & (token_numbers < tokens), token_numbers, -1)
    # A rank of context parallelism may get one padding id alone; anywhere else that is a fault.
    padding = not made.numel() or (padding_alone and bool((made == made.flatten()[0]).all()))
    if tokens and not padding and not bool((token_numbers >= 0).any()):
        raise MicroBatchError(
            "none of the token numbers came out of the preprocessing",
            expected="the numbers that it was given, in the places of the token ids",
            got=f"{made.numel()} values from {int(made.min())} to {int(made.max())}",
            cause="fn tokenises, clamps, or uses other data than its argument",
        )
    return token_numbers


def _fed(fn: Preprocessing, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Return what `fn` makes of these, int64 [rows] or [batch, sequence]."""
    fed = fn(sequences)
    made = None if isinstance(fed, Mapping) else torch.as_tensor(fed, device="cpu").detach()
    if made is None or made.dtype not in (torch.int32, torch.int64):
        raise MicroBatchError(
            "the preprocessing returns something else than token ids",
            expected="an integer tensor, as a model is fed",
            got=shown(fed),
            cause="fn returns a batch or a mask: pick input_ids",
        )
    made = made.to(torch.int64)
    if made.dim() == 2 and made.shape[0] == 1:
        made = made[0]
    if made.dim() not in (1, 2):
        raise MicroBatchError(
            "the preprocessing returns another shape than a model is fed",
            expected="[rows], [1, rows] or [batch, sequence]",
            got=list(made.shape),
        )
    return made
