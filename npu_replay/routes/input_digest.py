"""A digest of what a model is called with beside its token ids: pixel values, grids, audio features.

The same question about two images of one size has the same token ids, and other experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from npu_replay.routes.arguments import is_plain

_INPUTS = ("pixel", "image", "video", "vision", "audio", "speech", "grid", "feature", "input_values")
_DERIVED = (
    *("mask", "position", "rotary", "bias", "token", "label", "loss", "log", "weight", "reward", "advantage"),
    *("decoder_input", "embed", "hidden", "states", "past", "cache", "seed", "rng", "noise"),
)
_SAMPLED = 2**16
"""Elements of a tensor that are hashed: 0.5 MB as int64."""


def other_inputs(call: Mapping[str, Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a call that identify its sample beside the token ids, by name.

    A tensor counts, also inside lists and dicts, whose name says that it is an image, video or audio
    (`pixel_values`, `image_grid_thw`, `input_features`). So does each other floating-point or uint8 tensor of
    two dimensions or more, unless it has one value or vector a token, or one value a sample. Masks,
    positions, labels, losses, embeddings, states, caches and random numbers never count, by their names.

    >>> call = {"pixel_values": torch.ones(4, 8), "temperature": torch.ones(1)}
    >>> list(other_inputs(call, ids=torch.ones(1, 3)))
    ['pixel_values']
    """
    batch = tuple(ids.shape[:2])
    return {name: one for name, one in _tensors(call, "") if _identifies(name.lower(), one, batch)}


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a tensor: int64, no dimensions, on its device, where the host doesn't wait for it.

    Of more than 65,536 elements every n-th counts. Floating-point numbers count as bfloat16, so a cast to
    it between two passes changes nothing.
    """
    flat = tensor.detach().reshape(-1)
    values = flat[:: -(-len(flat) // _SAMPLED) | 1]  # an odd step doesn't stay in the same columns of a row
    if values.is_floating_point():
        values = values.float().nan_to_num().bfloat16().view(torch.int16)  # a NaN's bits differ by device
    bits = values.long()
    bits = (bits ^ bits >> 16) & 0xFFFF  # 16 bits by weights of 31, 2**16 times: the sum doesn't overflow
    return (bits * _weights(tensor.device)[: len(bits)]).sum()


def input_key(others: Mapping[str, torch.Tensor]) -> str | None:
    """Return a sample_key made of these inputs, None without any. The host waits for the device."""
    said = [f"{name} {list(one.shape)} {int(digest(one))}" for name, one in sorted(others.items())]
    return ", ".join(said) or None


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return fixed pseudo-random numbers of 31 bits, int64."""
    mixed = np.arange(1, _SAMPLED + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    with torch.inference_mode(False):
        return torch.from_numpy((mixed >> np.uint64(33)).astype(np.int64)).to(device)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        found = value.values() if value.is_nested and value.layout == torch.jagged else value
        if is_plain(found) and type(found).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            yield name, torch.view_as_real(found) if found.is_complex() else found
    elif isinstance(value, (Mapping, list, tuple)):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(one, f"{name}.{key}" if name else str(key))


def _identifies(name: str, tensor: torch.Tensor, batch: tuple[int, ...]) -> bool:
    if any(word in name for word in _DERIVED):
        return False
    if any(word in name for word in _INPUTS):
        return True
    shape = tuple(tensor.shape)
    of_tokens = shape[: len(batch)] in (batch, batch[::-1]) or shape in (
        (batch[0], batch[-1] - 1),
        (batch[0], 1),
    )
    return (tensor.is_floating_point() or tensor.dtype == torch.uint8) and len(shape) > 1 and not of_tokens
