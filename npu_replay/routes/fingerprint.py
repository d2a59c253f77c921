"""Computes the fingerprint of a sequence's token ids: which tokens, of which sample, routes belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from npu_replay.errors import ReplayError, shown, whole_number
from npu_replay.routes.checks import Array, Finding

SampleKey: TypeAlias = "int | str | None"


def fingerprint(token_ids: torch.Tensor | np.ndarray | Sequence[int], *, sample_key: SampleKey = None) -> int:
    """Return the 64-bit fingerprint of one sequence of token ids, shape [tokens].

    It is BLAKE2b with an 8-byte digest over the ids as little-endian int64, read as a little-endian unsigned
    integer. The hash is part of the file format: it won't change.

    >>> npu_replay.fingerprint([151644, 872, 198])
    1855700983335460597

    A sample_key tells samples of the same tokens apart (other images): it decides the lower 32 bits, and the
    upper 32 are those of the tokens alone.

    Raises:
        ReplayError: no integers that fit into int64, or another shape; a key that is no text or integer.
    """
    ids = as_token_ids(token_ids)
    if ids is None:
        raise ReplayError(
            "these aren't the token ids of one sequence",
            where="fingerprint",
            expected="integers, [tokens]",
            got=shown(token_ids),
            cause="a batch (take its samples one by one), or logits, text or embeddings in its place",
        )
    ids = np.ascontiguousarray(ids, dtype="<i8")
    mark = int.from_bytes(hashlib.blake2b(ids.data, digest_size=8).digest(), "little")
    return with_key(mark, sample_key)


def with_key(mark: int, sample_key: SampleKey) -> int:
    """Return the fingerprint of the same tokens with this key; unchanged if the key is None."""
    if sample_key is None:
        return mark
    if not isinstance(sample_key, str):
        sample_key = whole_number(sample_key, "sample_key that isn't text")
    text = f"{mark >> 32:08x} {sample_key}".encode(errors="surrogatepass")
    return mark >> 32 << 32 | int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def find_other_length(rows: int, tokens: int) -> Finding | None:
    """Find whether there is another number of rows than one a token, or one a token but the last."""
    if rows in (tokens, tokens - 1):
        return None
    return Finding(
        "the routes have another number of tokens than the sequence",
        f"{tokens} (or {tokens - 1}: the last token has no route)",
        rows,
        cause="routes of the response alone, without its prompt's rows; a response that was cut after the "
        "rollout; a turn's new tokens alone; another sequence; or "
        "padding that no attention_mask shows",
    )


def find_other_tokens(rows: int, theirs: int | None, tokens: int, mark: int | None) -> Finding | None:
    """Find why rows of routes can't be those of these tokens; a fingerprint of None fits any."""
    wrong_length = find_other_length(rows, tokens)
    if wrong_length is not None:
        return wrong_length
    if mark is None or theirs is None or theirs == mark:
        return None
    if theirs >> 32 == mark >> 32:
        return Finding(
            "the routes are of these tokens, and have another sample_key",
            f"fingerprint {mark:#018x}",
            f"{theirs:#018x}",
            cause="another sample of the same tokens; or a layout that has no keys, as of_batch's: "
            "dataclasses.replace(layout, fingerprints=[npu_replay.fingerprint(tokens, sample_key=key), ...])",
        )
    return Finding(
        "the routes belong to other tokens",
        f"fingerprint {mark:#018x}",
        f"{theirs:#018x}",
        cause="retokenised text, a shuffled batch, parts merged in another order, another sample or its key; "
        "or a fingerprint of tokens without the last",
    )


def as_token_ids(value: Any) -> Array | None:
    """Return token ids as [tokens] int64; None if they aren't one row of integers that fit."""
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            return None
        # Copied, as the caller's own array may change later; a list was converted to a new one above.
        ids = array.astype(np.int64, copy=not isinstance(value, (list, tuple)))
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return None  # ragged, of things that aren't numbers, or a tensor that numpy can't hold
    wrapped = array.size and int(array.max()) != int(ids.max())
    return None if wrapped else ids
