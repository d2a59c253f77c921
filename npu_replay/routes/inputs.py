"""Describes the inputs of a model's call, and the tokens and images that routes belong to.

A router can't see that two micro-batches of one shape have changed places, or that padding is on the other
side. Their token ids differ, and images of one size differ in their pixels.
"""

from __future__ import annotations

import base64
import functools
import inspect
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import nn

from npu_replay.routes.arguments import as_tensor, is_plain
from npu_replay.routes.checks import Finding
from npu_replay.routes.fingerprint import fingerprint
from npu_replay.routes.host_copies import HostCopy

Others: TypeAlias = "dict[str, tuple[torch.Size, torch.Tensor | int]]"
_NAMES = ("input_ids", "tokens")
_INPUTS = ("pixel", "image", "video", "vision", "audio", "speech", "grid", "feature", "input_values")
_DERIVED = (
    *("mask", "position", "rotary", "bias", "token", "label", "loss", "log", "weight", "reward", "advantage"),
    *("decoder_input", "embed", "hidden", "states", "past", "cache", "seed", "rng", "noise"),
)
_SAMPLED = 2**16
"""The largest number of elements of a tensor that are hashed: 0.5 MB as int64."""


class Called(NamedTuple):
    """Holds the inputs of a call: a copy of its token ids, and shape and digest of each other input.

    `real` is its attention_mask as bool, if that has the shape of the ids; `single` says that the ids are
    one sequence, without padding.
    """

    tokens: torch.Tensor
    others: Others
    real: torch.Tensor | None = None
    single: torch.Tensor | bool = False
    copy: HostCopy | None = None

    def leaving(self) -> Called:
        """Return the same with a copy on its way to the host."""
        return self._replace(copy=self._host_copy())

    def has_come(self) -> bool:
        """Return whether `on_host` returns without waiting."""
        return self.copy is not None and self.copy.has_come()

    def on_host(self) -> Called:
        """Return a copy in host memory. Waits for the device, unless the copy has come."""
        tokens, single, *rest = (self.copy or self._host_copy()).read()
        digests = iter(rest)
        others: Others = {name: (shape, int(next(digests))) for name, (shape, _) in self.others.items()}
        return Called(tokens, others, None if self.real is None else rest[-1], bool(single))

    def _host_copy(self) -> HostCopy:
        digests = [as_tensor(digest) for _, digest in self.others.values()]
        real = [] if self.real is None else [self.real]
        return HostCopy([self.tokens, as_tensor(self.single), *digests, *real])


@dataclass(frozen=True, eq=False)
class Inputs:
    """Describes the tokens that routes belong to, in the form in which a model is called with them.

    Attributes:
        fed: int64 [tokens fed], the packed token in each place, or -1 for padding; None for a record, whose
            tokens are one sequence in the order of memory.
        marks: the fingerprint of each sequence; None for one that isn't checked.
        others: shape and digest of each other input of a record; None for a layout.
        shape: of a record's token ids, [batch, sequence] most often; None for a layout.
        tokens: a record's token ids in this shape, as long as they are in this process.
    """

    fed: torch.Tensor | None
    lengths: tuple[int, ...]
    marks: Sequence[int | None]
    others: Others | None = None
    shape: tuple[int, ...] | None = None
    tokens: torch.Tensor | None = None

    @classmethod
    def recorded(cls, called: Called) -> Inputs:
        """Return the inputs of a recorded forward; `called` comes from `Called.on_host`."""
        tokens = called.tokens
        marks = (fingerprint(tokens.flatten()),)
        return cls(None, (tokens.numel(),), marks, called.others, tuple(tokens.shape), tokens)

    @property
    def tells_tokens(self) -> bool:
        """Return whether the tokens of any sequence are known, and not only where they lie."""
        return any(mark is not None for mark in self.marks)

    def described(self) -> dict[str, Any]:
        """Return what bytes and files hold of this, as JSON: digests of the tokens, and where they lie."""
        others = None
        if self.others is not None:
            others = {
                name: [[*shape], int(digest_of)] for name, (shape, digest_of) in sorted(self.others.items())
            }
        return {
            "lengths": [*self.lengths],
            "marks": [*self.marks],
            "fed": None if self.fed is None else _packed(self.fed),
            "shape": None if self.shape is None else [*self.shape],
            "others": others,
        }

    @classmethod
    def read(cls, values: dict[str, Any]) -> Inputs:
        """Return what `described` gave; anything else raises an error of Python's."""
        lengths = tuple(map(operator.index, values["lengths"]))
        marks = tuple(None if mark is None else operator.index(mark) for mark in values["marks"])
        fed = None if values["fed"] is None else _unpacked(values["fed"])
        others: Others | None = None
        if values["others"] is not None:
            others = {
                name: (torch.Size(size), int(digest_of))
                for name, (size, digest_of) in values["others"].items()
            }
        shape = None if values["shape"] is None else tuple(map(operator.index, values["shape"]))
        return cls(fed, lengths, marks, others, shape)

    def differing(self, called: Called) -> list[str] | None:
        """Return the inputs that differ; None if no whole sequence can be compared."""
        tokens = called.tokens.flatten().long()
        fed = torch.arange(sum(self.lengths), device="cpu") if self.fed is None else self.fed
        if len(tokens) != len(fed):
            return None  # not this batch's token ids; the routers refuse rows that don't fit
        there = fed >= 0
        packed = torch.zeros(sum(self.lengths), dtype=torch.int64, device="cpu")
        packed[fed[there]] = tokens[there]
        # Only sequences that are fed as a whole have a fingerprint that can be compared.
        here = torch.zeros(len(packed), dtype=torch.bool, device="cpu").index_fill(0, fed[there], True)
        spans = pairwise(accumulate(self.lengths, initial=0))
        same = [
            fingerprint(packed[first:end]) >> 32 == mark >> 32  # a call has no sample_key
            for (first, end), mark in zip(spans, self.marks, strict=True)
            if mark is not None and here[first:end].all()
        ]
        ours = called.others if self.others is None else self.others
        others = sorted(name for name in ours | called.others if ours.get(name) != called.others.get(name))
        return (others if all(same) else ["tokens", *others]) if same else None


def _packed(fed: torch.Tensor) -> str:
    """Return places as text: most steps from one place to the next are the same, and compress well."""
    steps = np.diff(fed.numpy(), prepend=0).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes())).decode()


def _unpacked(text: str) -> torch.Tensor:
    """Return the places that `_packed` wrote."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8")
    return torch.from_numpy(steps.cumsum())


def find_other_order(
    model: str | None, order: str | None, fed: torch.Tensor | None, shape: Sequence[int] | None
) -> Finding | None:
    """Find whether a layout's rows are in another order than those of a model's routers.

    Args:
        model: the order of the routers' rows, "sequence" or "batch"; None if unknown.
        order: that of the layout; None if it gives both orders the same rows.
        fed: the layout's places, None if unknown.
        shape: that of the token ids that the model is called with, None if unknown.
    """
    problem = "the routes were laid out in another order of rows than the model's"
    if model is not None and order is not None and model != order:
        cause = "order= left at Megatron's, sequence-major, for a model of transformers (batch-major)"
        if model == "sequence":
            cause = "order= left at transformers', batch-major, for a model of Megatron's (sequence-major)"
        return Finding(problem, f"TokenLayout with order={model!r}", f"order={order!r}", cause=cause)
    if model == "sequence" and order is None and fed is not None and is_grid(shape):
        return Finding(
            problem,
            f"TokenLayout.padded, for a call with token ids {[*shape]}",
            "rows of one stream",
            cause="TokenLayout.packed, or a probe that returns flat rows, for a batch that is padded",
        )
    return None


def find_other_padding(fed: torch.Tensor | None, real: torch.Tensor | None) -> Finding | None:
    """Find a sequence whose tokens lie in other places of a call than in a layout.

    A row of the attention mask with more or fewer tokens than the layout's may be right: some of a sequence's
    tokens may be masked out, and the padding of others not.

    Args:
        fed: the layout's places, None if unknown.
        real: the attention mask of the call, bool, None if unknown.
    """
    if fed is None or real is None or real.dim() != 2 or real.numel() != len(fed):
        return None
    there = (fed >= 0).view(real.shape)
    moved = (there.sum(dim=1) == real.sum(dim=1)) & (there != real).any(dim=1)
    if not bool(moved.any()):
        return None
    row = int(moved.nonzero()[0])
    expected, got = (f"row {row} from place {int(places[row].nonzero()[0])} on" for places in (real, there))
    return Finding(
        "the layout pads the batch on another side than its attention mask",
        expected,
        f"{got} in the layout",
        cause="side= of TokenLayout.padded, or lengths in another order than the batch's",
    )


def is_grid(shape: Sequence[int] | None) -> TypeGuard[Sequence[int]]:
    """Return whether [batch, sequence] of this shape gives other rows in one order than in the other."""
    return shape is not None and len(shape) == 2 and min(shape) > 1


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of a module's positional arguments; for a wrapper (DDP) those of the inner module."""
    forward = getattr(vars(module).get("forward"), "__wrapped__", module.forward)  # beneath a wrapper
    function = getattr(forward, "__func__", None)
    names = list(_positional(forward) if function is None else _positional(function)[1:])
    inner = getattr(module, "module", None)
    return parameter_names(inner) if not names and isinstance(inner, nn.Module) else names or ["input_ids"]


@functools.lru_cache(maxsize=64)
def _positional(function: Callable[..., object]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.items()
    return tuple(name for name, parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)


def named(args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None = None) -> dict[str, Any]:
    """Return the arguments of a model's call by name.

    Where none of them is the token ids and the first is a batch (a mapping), what that holds takes its place.

    >>> from npu_replay.routes.inputs import named
    >>> list(named([], {"batch": {"input_ids": torch.ones(1, 3)}, "step": 2}))
    ['input_ids', 'step']
    """
    names = parameter_names(module) if args and module is not None else []
    names += [f"argument {number}" for number in range(len(names), len(args))]
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    if call and not any(isinstance(call.get(name), torch.Tensor) for name in _NAMES):
        name, batch = next(iter(call.items()))
        if isinstance(batch, Mapping):
            del call[name]
            call = {str(key): value for key, value in batch.items()} | call
    return call


def copied(args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None = None) -> Called | None:
    """Return the inputs of a model's call, with its token ids copied; None if it gets no token ids.

    The ids are the argument named input_ids or tokens, also in a batch that is the first argument; or the
    first argument if it is [batch, sequence]. Padding by an attention_mask of that shape counts as 0: its ids
    may differ from pass to pass.
    """
    call = named(args, kwargs, module)
    first = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].dim() > 1 else None
    ids = next((call[name] for name in _NAMES if isinstance(call.get(name), torch.Tensor)), first)
    if type(ids) is not torch.Tensor or ids.dtype not in (torch.int64, torch.int32):
        return None
    if ids.is_nested or ids.dim() == 0:
        return None
    others: Others = {
        name: (tensor.shape, digest(tensor)) for name, tensor in other_inputs(call, ids).items()
    }
    mask = call.get("attention_mask")
    single = _is_one_sequence(call, ids)
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        real = mask.detach() != 0
        return Called(ids.detach() * real, others, real, single & real.all())
    # Copied, as loaders and captured graphs write the next batch into the same memory.
    return Called(ids.detach().clone(), others, None, single if mask is None else False)


def _is_one_sequence(call: Mapping[str, Any], ids: torch.Tensor) -> torch.Tensor | bool:
    """Return whether these ids are one sequence, padded or not; False where that can't be told."""
    positions = call.get("position_ids")
    packed = any(value is not None and ("cu_seq" in name or "packed" in name) for name, value in call.items())
    if packed or ids.shape[-1] != ids.numel():
        return False
    if isinstance(positions, torch.Tensor) and positions.numel() == ids.numel():
        return (positions.detach().flatten().diff() == 1).all()
    return positions is None


def other_inputs(call: Mapping[str, Any], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a call that identify its sample beside the token ids, by name.

    A tensor counts, also inside lists and dicts, if its name says image, video or audio (`pixel_values`,
    `image_grid_thw`, `input_features`). So does any other floating-point or uint8 tensor of two dimensions or
    more, unless it has one value or vector per token, or in each sample at most one value per token (figures
    of the response). Masks, positions, labels, losses, embeddings, states, caches and random numbers never
    count, by their names.

    >>> call = {"pixel_values": torch.ones(4, 8), "temperature": torch.ones(1)}
    >>> list(other_inputs(call, ids=torch.ones(1, 3)))
    ['pixel_values']
    """
    batch = tuple(ids.shape[:2])
    return {name: tensor for name, tensor in _tensors(call, "") if _identifies(name.lower(), tensor, batch)}


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's digest, int64 without dimensions, on its device; the host doesn't wait for it."""
    # Of more than 65,536 elements every n-th counts. Floating-point numbers count as bfloat16, so that a cast
    # to it between two passes changes nothing.
    flat = tensor.detach().reshape(-1)
    values = flat[:: -(-len(flat) // _SAMPLED) | 1]  # odd, so as not to stay in the same columns of a row
    if values.is_floating_point():
        values = values.float().nan_to_num().bfloat16().view(torch.int16)  # a NaN's bits differ by device
    bits = values.long()
    bits = (bits ^ bits >> 16) & 0xFFFF  # 16 bits by weights of 31, 2**16 times: the sum doesn't overflow
    return (bits * _weights(tensor.device)[: len(bits)]).sum()


def input_key(others: Mapping[str, torch.Tensor]) -> str | None:
    """Return a sample_key made of these inputs, or None without any. The host waits for the device."""
    described = [
        f"{name} {list(tensor.shape)} {int(digest(tensor))}" for name, tensor in sorted(others.items())
    ]
    return ", ".join(described) or None


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return fixed pseudo-random numbers of 31 bits, int64."""
    mixed = np.arange(1, _SAMPLED + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    # Cached: made in inference mode, it couldn't take part in autograd later.
    with torch.inference_mode(False):
        return torch.from_numpy((mixed >> np.uint64(33)).astype(np.int64)).to(device)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        tensor = value.values() if value.is_nested and value.layout == torch.jagged else value
        if is_plain(tensor) and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            yield name, torch.view_as_real(tensor) if tensor.is_complex() else tensor
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}" if name else str(key))


def _identifies(name: str, tensor: torch.Tensor, batch: tuple[int, ...]) -> bool:
    if any(word in name for word in _DERIVED):
        return False
    if any(word in name for word in _INPUTS):
        return True
    shape = tuple(tensor.shape)
    # Figures of a response, such as returns, have fewer values than the sequence has tokens.
    of_response = len(shape) == 2 and shape[0] == batch[0] and shape[1] <= batch[-1]
    of_tokens = shape[: len(batch)] in (batch, batch[::-1]) or of_response
    return (tensor.is_floating_point() or tensor.dtype == torch.uint8) and len(shape) > 1 and not of_tokens
