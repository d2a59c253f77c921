"""Which sequences one call of a Hugging Face model is fed, and in which of its rows each lies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from npu_replay.errors import MicroBatchError
from npu_replay.routers import Router, labels_of
from npu_replay.routes.checks import Array
from npu_replay.routes.fingerprint import fingerprint
from npu_replay.routes.routed_experts import RoutedExperts

_IDS = ("input_ids", "tokens")
_OTHER_INPUTS = ("pixel_values", "image", "video", "audio", "input_features")
"""How arguments begin that a model chooses experts by and that no token id tells."""

_refuse_unless = MicroBatchError.unless


@dataclass(frozen=True)
class FedSequences:
    """The sequences of one call, of two tokens or more; rows are those of [batch, sequence], batch-major.

    Nothing is learnt from a sequence of one token (often the padding of a packed stream), so it has no place
    here.

    Attributes:
        rows: how many there are, padding too.
        spans: first row and end of each sequence.
        marks: the fingerprint of each.
    """

    rows: int
    spans: list[tuple[int, int]]
    marks: list[int]

    def in_rows(self, found: Mapping[int, RoutedExperts], routers: Sequence[Router]) -> RoutedExperts:
        """The routes of these sequences, by number, for these routers; all other rows have none."""
        labels = labels_of(routers)
        if not found:
            topk, experts = routers[0].topk, routers[0].num_experts
            return RoutedExperts.unrecorded(self.rows, layers=labels, topk=topk, num_experts=experts)
        index, begin = torch.full((self.rows,), -1), 0
        for at, routes in found.items():
            first = self.spans[at][0]
            index[first : first + len(routes)] = torch.arange(begin, begin + len(routes))
            begin += len(routes)
        return RoutedExperts.concat(list(found.values()), labels).take(index)


def named(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are None.

    Raises:
        MicroBatchError: there are positional ones that nothing names.
    """
    names = _names(module) if args else []
    problem, cause = "this call's arguments have no names", "a wrapper: follow the model in it, or name them"
    _refuse_unless(len(args) <= len(names), problem, f"at most {len(names)} without", len(args), cause)
    call = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: value for name, value in call.items() if value is not None}


def _names(module: nn.Module) -> list[str]:
    """The positional arguments of a module; of a wrapper that hands all on (DDP), those of what it wraps."""
    parameters = inspect.signature(module.forward).parameters.items()
    names = [name for name, one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    inner = getattr(module, "module", None)
    return _names(inner) if not names and isinstance(inner, nn.Module) else names or ["input_ids"]


@dataclass(frozen=True)
class Places:
    """The places of a call, [batch, sequence], batch-major.

    Attributes:
        real: bool, which hold tokens.
        spans: first place and end of each sequence, of one token too.
    """

    real: Array
    spans: list[tuple[int, int]]

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, sequence)."""
        rows, width = self.real.shape
        return rows, width

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Places:
        """Those of a call with these arguments: padded on any side, or packed.

        Raises:
            MicroBatchError: a mask with holes, or a part of a sequence.
        """
        fed = [call[name] for name in (*_IDS, "inputs_embeds") if isinstance(call.get(name), torch.Tensor)]
        known = bool(fed) and not fed[0].is_nested and fed[0].dim() >= 2
        _refuse_unless(
            known,
            "this call doesn't tell its tokens",
            " or ".join(_IDS) + ", [batch, sequence]",
            sorted(call),
        )
        real = _real(call.get("attention_mask"), tuple(fed[0].shape[:2]))
        positions = _positions(call)
        bounds = call.get("cu_seq_lens_q", call.get("cu_seqlens")) if positions is None else None
        if bounds is not None:
            real = _real_up_to(_array(bounds)[-1], real)
        begins = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]
        if positions is not None:
            begins = _by_positions(positions, real, begins)
        elif bounds is not None:
            begins = _by_bounds(_array(bounds), begins)
        first = begins.reshape(-1).nonzero()[0]
        stops = np.append((begins | ~real).reshape(-1).nonzero()[0], real.size)
        end = stops[np.searchsorted(stops, first, side="right")]
        return cls(real, [(int(a), int(b)) for a, b in zip(first, end, strict=True)])


def fed_sequences(call: Mapping[str, Any]) -> FedSequences:
    """Those of a call with these arguments.

    Raises:
        MicroBatchError: there are no token ids, other inputs beside them, a mask with holes, or a part of a
            sequence.
    """
    ids = next((call[name] for name in _IDS if name in call), None)
    other = _other_inputs(call)
    _refuse_unless(
        isinstance(ids, torch.Tensor) and not ids.is_nested and ids.dim() == 2 and not other,
        "routes are found by token ids, and this call isn't told by them",
        "input_ids, [batch, sequence], and no images or embeddings",
        ", ".join(other or sorted(call)),
        "embeddings in the place of ids, or images, in which two samples of the same tokens differ",
    )
    places, flat = Places.of(call), _array(ids).reshape(-1)
    spans = [(first, end) for first, end in places.spans if end - first > 1]
    return FedSequences(places.real.size, spans, [fingerprint(flat[a:b]) for a, b in spans])


def _other_inputs(call: Mapping[str, Any]) -> list[str]:
    return [name for name in call if name == "inputs_embeds" or name.startswith(_OTHER_INPUTS)]


def _array(tensor: Any) -> Array:
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    host = tensor.detach().cpu()
    return np.asarray(host.float() if host.is_floating_point() else host)  # numpy has no bfloat16


def _real(mask: Any, shape: tuple[int, ...]) -> Array:
    """Bool [batch, sequence]: which places hold tokens."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    alike = isinstance(mask, torch.Tensor) and mask.shape == shape
    flags = _array(mask) if alike else np.full(1, -1)
    _refuse_unless(
        bool(((flags == 0) | (flags == 1)).all()),
        "this attention_mask doesn't tell which places are padding",
        f"zeros and ones, {list(shape)}",
        "other numbers" if alike else list(getattr(mask, "shape", [])) or type(mask).__name__,
        "a mask of four dimensions, of sequence numbers (packing), or a dict of several",
    )
    real: Array = flags != 0
    runs = (real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]).sum(axis=1)
    _refuse_unless(
        bool((runs <= 1).all()),
        "this attention_mask has holes",
        "one run of ones in each row",
        f"{int(runs.max(initial=0))} in row {int(runs.argmax()) if len(runs) else 0}",
        "tokens that are masked out between others (tool answers, say): mask them in the loss instead",
    )
    return real


def _positions(call: Mapping[str, Any]) -> Any:
    """Those that tell of sequences: of images (time, height, width) they don't, unless text's come first."""
    positions = call.get("position_ids")
    kinds = len(positions) if isinstance(positions, torch.Tensor) and positions.dim() == 3 else 1
    return None if kinds == 3 and _other_inputs(call) else positions


def _by_positions(positions: Any, real: Array, begins: Array) -> Array:
    """Where sequences begin: at each position 0."""
    numbers = _array(positions)
    numbers = numbers[0] if numbers.ndim == 3 else numbers  # several kinds of positions
    numbers = np.broadcast_to(numbers, real.shape) if numbers.ndim <= 2 else numbers
    before = np.pad(numbers, ((0, 0), (1, 0)))[:, :-1]
    starts: Array = real & (numbers == 0)
    _refuse_unless(
        bool((~begins | starts).all()) and bool((~real | starts | (numbers == before + 1)).all()),
        "these position_ids tell of a part of a sequence",
        "positions that count up from 0 in each sequence",
        numbers[real].tolist()[:20],
        "sequence or context parallelism, which gives each rank a part; or positions that count padding",
    )
    return starts


def _real_up_to(end: int, real: Array) -> Array:
    """Without what lies behind the last sequence: the padded end of a packed stream."""
    _refuse_unless(
        end <= real.size,
        "these cumulative lengths go beyond the call's tokens",
        f"at most {real.size}, the tokens of this call",
        int(end),
        "sequence or context parallelism, which gives each rank a part of the tokens and all lengths",
    )
    return real & (np.arange(real.size) < end).reshape(real.shape)


def _by_bounds(bounds: Array, begins: Array) -> Array:
    """Where sequences begin, by cumulative lengths over all rows."""
    inside = bounds[:-1][bounds[:-1] < begins.size]
    found = begins.reshape(-1).copy()
    found[inside] = True
    return found.reshape(begins.shape)
