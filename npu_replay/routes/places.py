"""Find which places of a model's call hold tokens, and where each sequence begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_replay.errors import MicroBatchError, shown
from npu_replay.routes.arguments import as_tensor
from npu_replay.routes.checks import Array
from npu_replay.routes.fingerprint import fingerprint
from npu_replay.routes.host_copies import HostCopy

IDS = ("input_ids", "tokens")
"""The names under which a call gives its token ids."""
_OTHER_INPUTS = ("pixel_values", "image", "video", "audio", "input_features", "inputs_embeds")
"""Prefixes of arguments that influence the routing and that no token id shows."""


class Places(NamedTuple):
    """Describes the places of a call, [batch, sequence], batch-major."""

    real: Array  # bool, which hold tokens
    spans: list[tuple[int, int]]  # first place and end of each sequence, of one token too
    # Bool [places]: from here to the end of the row all ids are one padding id. A sequence that begins here
    # may be the padded end of a packed row, since positions count up there, too.
    padded: Array

    @classmethod
    def of(cls, call: Mapping[str, Any], padding: int = 0) -> Places:
        """Find the places of a call with these arguments, padded (with 0 or `padding`) or packed."""
        fed = [call[name] for name in (*IDS, "inputs_embeds") if isinstance(call.get(name), torch.Tensor)]
        wanted = " or ".join(IDS)
        MicroBatchError.unless(
            bool(fed) and not fed[0].is_nested and fed[0].dim() >= 2,
            "this call has no token ids",
            expected=f"{wanted}, [batch, sequence]",
            got=sorted(call),
        )
        real = _real(call.get("attention_mask"), tuple(fed[0].shape[:2]))
        begins = real & ~_before(real)
        positions = call.get("position_ids")
        kinds = len(positions) if isinstance(positions, torch.Tensor) and positions.dim() == 3 else 1
        if kinds == 3 and any(name.startswith(_OTHER_INPUTS) for name in call):
            positions = None  # time, height and width of images, without the positions of the text
        bounds = call.get("cu_seq_lens_q", call.get("cu_seqlens"))
        if positions is not None:  # a sequence begins at each 0
            numbers = on_host(positions)
            numbers = numbers[0] if numbers.ndim == 3 else numbers
            alike = numbers.shape[-1:] == real.shape[-1:]
            if not (alike and len(numbers) in (1, len(real))):
                raise MicroBatchError(
                    "position_ids have another shape than the ids",
                    expected=[*real.shape],
                    got=[*numbers.shape],
                )
            numbers = np.broadcast_to(numbers, real.shape)
            starts = real & (numbers == 0)
            goes_on = ~real | starts | (numbers == _before(numbers) + 1)
            if not ((~begins | starts) & goes_on).all():
                raise MicroBatchError(
                    "these position_ids are of a part of a sequence",
                    expected="positions from 0 in each sequence",
                    got=numbers[real].tolist()[:20],
                    cause="sequence or context parallelism, which gives each rank a part; or positions that "
                    "count padding",
                )
            begins = starts
        elif bounds is not None:
            bounds = on_host(bounds)
            if bounds[-1] > real.size:
                raise MicroBatchError(
                    "the cumulative lengths exceed the call's tokens",
                    expected=f"at most {real.size}",
                    got=int(bounds[-1]),
                    cause="sequence or context parallelism: each rank has a part of the tokens, and all "
                    "lengths",
                )
            # Behind the last sequence is the padded end of a packed stream.
            real = real & (np.arange(real.size) < bounds[-1]).reshape(real.shape)
            begins = real & ~_before(real)
            begins.reshape(-1)[bounds[:-1][bounds[:-1] < begins.size]] = True
        first = begins.reshape(-1).nonzero()[0]
        stops = np.append((begins | ~real).reshape(-1).nonzero()[0], real.size)
        end = stops[np.searchsorted(stops, first, side="right")]
        # Padding is never at the beginning of a row, nor behind what a mask leaves out, and embeddings don't
        # show it.
        ids = on_host(fed[0]) if fed[0].dim() == 2 else np.full(real.shape, np.nan)
        alike = real & (ids == ids[:, -1:]) & np.isin(ids, (0, padding))
        padded = _before(real) & np.logical_and.accumulate(alike[:, ::-1], axis=1)[:, ::-1]
        return cls(real, list(zip(first.tolist(), end.tolist(), strict=True)), padded.reshape(-1))


def read_batch(
    ids: Any, mask: Any, positions: Any, bounds: Any
) -> tuple[torch.Tensor, tuple[int, ...], list[int]]:
    """Return the packed token in each place of a call, and length and fingerprint of each sequence.

    The places are [batch, sequence], with -1 for padding.

    Raises:
        MicroBatchError: the arguments don't say which places hold which sequence, or contradict each other.
    """
    arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "cu_seqlens": bounds}
    tensors = {name: as_tensor(value).detach() for name, value in arguments.items() if value is not None}
    # All copies leave before one is waited for.
    call = dict(zip(tensors, HostCopy(list(tensors.values())).read(), strict=True))
    for name, tensor in call.items():
        if tensor.dim() == 1 and name != "cu_seqlens":
            call[name] = tensor[None]
    ids = call["input_ids"]
    bounds = call.get("cu_seqlens")
    numbers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() != 2 or ids.is_nested or not numbers:
        raise MicroBatchError(
            "these aren't the token ids of a batch",
            expected="whole numbers, [batch, sequence] or [tokens]",
            got=shown(ids),
        )
    if bounds is not None:
        _check_bounds(bounds, call)
    axes = None
    if _are_of_images(call.get("position_ids")):
        if mask is None and bounds is None:
            raise MicroBatchError(
                "positions of images don't tell where sequences begin",
                expected="attention_mask or cu_seqlens beside position_ids [3, batch, sequence]",
                got="neither",
                cause="M-RoPE (Qwen-VL): its axes are time, height and width",
            )
        axes = call.pop("position_ids")
    spans = Places.of(call).spans
    if axes is not None:
        _check_axes(axes, spans)
    if bounds is not None:
        by_bounds = [(first, end) for first, end in pairwise(bounds.tolist()) if first < end]
        if spans != by_bounds:
            raise MicroBatchError(
                "cu_seqlens and the other arguments tell different sequences",
                expected=f"{by_bounds}"[:200],
                got=f"{spans}"[:200],
                cause="cu_seqlens that count other tokens: they count the places of input_ids, row after row",
            )
    if mask is None:
        _check_end(ids, spans)
    places = torch.full((ids.numel(),), -1, device="cpu")
    flat = ids.reshape(-1)
    inside = [torch.arange(first, end, device="cpu") for first, end in spans]
    lengths = tuple(map(len, inside))
    places[torch.cat([torch.arange(0, device="cpu"), *inside])] = torch.arange(sum(lengths), device="cpu")
    return places.view(ids.shape), lengths, [fingerprint(flat[first:end]) for first, end in spans]


def _check_axes(axes: torch.Tensor, spans: list[tuple[int, int]]) -> None:
    """Refuse positions of images, [3, batch, sequence], by which other sequences begin than by a mask."""
    begins = (axes == 0).all(dim=0).reshape(-1)
    inside = {first + at for first, end in spans for at in begins[first:end].nonzero()[:, 0].tolist()}
    if inside != {first for first, _ in spans}:
        raise MicroBatchError(
            "the positions and the other arguments tell different sequences",
            expected=f"sequences from places {sorted(inside)}"[:200],
            got=f"{spans}"[:200],
            cause="packed sequences without cu_seqlens, under a mask of ones",
        )


def _are_of_images(positions: torch.Tensor | None) -> bool:
    """Return whether positions are time, height and width, [3, batch, sequence]; of a text they are equal."""
    if positions is None or positions.dim() != 3 or len(positions) != 3:
        return False
    return bool((positions[1:] != positions[0]).any())


def _check_bounds(bounds: torch.Tensor, call: Mapping[str, torch.Tensor]) -> None:
    """Refuse cumulative lengths that don't cover the tokens of a call."""
    whole = bounds.dim() == 1 and len(bounds) > 1 and not bounds.is_floating_point()
    if not (whole and int(bounds[0]) == 0 and bool((bounds.diff() >= 0).all())):
        raise MicroBatchError(
            "cu_seqlens are no cumulative lengths",
            expected="ascending whole numbers from 0 on, [sequences + 1]",
            got=f"{bounds.tolist()}"[:200],
            cause="lengths in their place",
        )
    mask = call.get("attention_mask")
    tokens = call["input_ids"].numel() if mask is None else int((mask != 0).sum())
    if int(bounds[-1]) != tokens:
        raise MicroBatchError(
            "cu_seqlens don't add up to the tokens of the batch",
            expected=f"{tokens} at the end",
            got=int(bounds[-1]),
            cause="a stream whose end is padded, which an attention_mask shows; one whose sequences are "
            "padded each: TokenLayout.packed(lengths, padded_lengths=...); cu_seqlens of another micro-batch",
        )


def _check_end(ids: torch.Tensor, spans: list[tuple[int, int]]) -> None:
    """Refuse a packed row whose last sequence repeats one id, since no mask says that it isn't padding."""
    width = ids.shape[1]
    for first, end in spans:
        row, begin = divmod(first, width)
        alike = begin > 0 and end % width == 0 and bool((ids[row, begin:] == ids[row, -1]).all())
        if alike:
            raise MicroBatchError(
                "the end of a packed row may be padding",
                expected="an attention_mask that tells",
                got=f"row {row}: id {int(ids[row, -1])} from place {begin} to the end, {width - begin} times",
                cause="padding to a multiple: attention_mask= with 0 there, or with 1 where these are tokens",
            )


def on_host(tensor: Any) -> Array:
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    host = tensor.detach().cpu()
    return np.asarray(host.float() if host.is_floating_point() else host)  # numpy has no bfloat16


def _before(values: Array) -> Array:
    """Return for each place of [batch, sequence] the value of the place before it; 0 for the first."""
    return np.pad(values, ((0, 0), (1, 0)))[:, :-1]


def _real(mask: Any, shape: tuple[int, ...]) -> Array:
    """Return bool [batch, sequence]: which places hold tokens."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    alike = isinstance(mask, torch.Tensor) and mask.shape == shape
    flags = on_host(mask) if alike else np.full(1, -1)
    if not ((flags == 0) | (flags == 1)).all():
        raise MicroBatchError(
            "this attention_mask doesn't tell which places are padding",
            expected=f"0 and 1, {list(shape)}",
            got="other numbers" if alike else list(getattr(mask, "shape", [])) or type(mask).__name__,
            cause="a mask of four dimensions, of sequence numbers (packing), or a dict of several",
        )
    real: Array = flags != 0
    runs = (real & ~_before(real)).sum(axis=1)
    if not (runs <= 1).all():
        raise MicroBatchError(
            "this attention_mask has holes",
            expected="one run of ones in each row",
            got=f"{int(runs.max(initial=0))} in row {int(runs.argmax()) if len(runs) else 0}",
            cause="tokens that are masked out between others (tool answers, say): mask them in the loss "
            "instead",
        )
    return real
