"""The wire form of RoutedExperts: a byte string that describes itself.

    8 bytes   magic and version, b"NPUROUT1"
    4 bytes   length of the header, little-endian
    header    JSON: tokens, layers, topk, num_experts, dtype, fingerprint, weight_version, digest; vouched,
              where it is true
    ids       [tokens, layers, topk], row-major, little-endian
    recorded  one bit a token, numpy.packbits

The digest is BLAKE2b (16 bytes) over the header without it, the ids and the recorded bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from npu_replay import json_text
from npu_replay.errors import RouteFileError
from npu_replay.routes.checks import MAX_EXPERTS, MAX_LAYERS, Array

if TYPE_CHECKING:
    from npu_replay.routes.routed_experts import RoutedExperts

MAGIC = b"NPUROUT1"
DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2")}


def header(routes: RoutedExperts) -> dict[str, Any]:
    """What has to be known beside the arrays."""
    return {
        "tokens": len(routes),
        "layers": list(routes.layers),
        "topk": routes.topk,
        "num_experts": routes.num_experts,
        "dtype": str(routes.ids.dtype).removeprefix("torch."),
        "fingerprint": routes.fingerprint,
        "weight_version": routes.weight_version,
        **({"vouched": True} if routes.vouched else {}),
    }


def shape_of(described: Any) -> tuple[int, int, int]:
    """[tokens, layers, topk], from a header that may hold anything; ValueError, KeyError or TypeError.

    After it `arguments` finds all that it takes, and numpy has the dtype.
    """
    for name, fit in _FITS.items():
        if name not in described:
            raise ValueError(f"no {name}")
        if not fit(described[name]):
            raise ValueError(f"{name} {str(described[name])[:80]!r}")
    return described["tokens"], len(described["layers"]), described["topk"]


def _whole(value: object, least: int, most: int) -> bool:
    """A whole number, and no bool, which Python takes for one."""
    return type(value) is int and least <= value <= most


def _labels(value: object) -> bool:
    return (
        type(value) is list
        and {*map(type, value)} <= {int}
        and -1 < min(value, default=0) <= max(value, default=0) < MAX_LAYERS
    )


_FITS: dict[str, Callable[[Any], bool]] = {
    "tokens": lambda value: _whole(value, 0, 1 << 48),
    "layers": _labels,
    "topk": lambda value: _whole(value, 1, MAX_EXPERTS),
    "num_experts": lambda value: _whole(value, 1, MAX_EXPERTS),
    "dtype": lambda value: type(value) is str and value in DTYPES,
    "fingerprint": lambda value: value is None or _whole(value, 0, (1 << 64) - 1),
    "weight_version": lambda value: value is None or type(value) in (int, str),
}


def digest(described: dict[str, Any], ids: memoryview | bytes, recorded: memoryview | bytes) -> str:
    """The checksum that both the wire form and the file carry."""
    summed = hashlib.blake2b(_written(described), digest_size=16)
    summed.update(ids)
    summed.update(recorded)
    return summed.hexdigest()


def _written(described: dict[str, Any]) -> bytes:
    try:
        return json.dumps(described, sort_keys=True).encode()
    except RecursionError as error:  # what was just within the limit when it was read
        raise ValueError("it is nested too deeply") from error


def pieces(routes: RoutedExperts) -> tuple[bytes, memoryview, bytes]:
    """Header, ids and recorded bits; the ids share memory with the routes. See the module for the layout."""
    described = header(routes)
    ids = routes.ids.contiguous().numpy().data.cast("B") if routes.ids.numel() else memoryview(b"")
    recorded = packed(routes.recorded)
    described["digest"] = digest(described, ids, recorded)
    text = _written(described)
    return b"".join((MAGIC, struct.pack("<I", len(text)), text)), ids, recorded


def packed(recorded: torch.Tensor) -> bytes:
    """One bit a token."""
    return np.packbits(recorded.numpy()).tobytes()


def parse(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the arguments of RoutedExperts; the ids share memory with `data`."""
    try:
        view = memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise RouteFileError(
            "these aren't bytes", expected="contiguous bytes, as to_bytes() makes them", got=type(data)
        ) from error
    if bytes(view[:8]) != MAGIC:
        raise RouteFileError(
            "these bytes aren't routes",
            expected=f"the first 8 bytes to be {MAGIC!r}",
            got=bytes(view[:8]),
            cause="another format, or another version of npu_replay",
        )
    try:
        (header_size,) = struct.unpack_from("<I", view, 8)
        text = bytes(view[12 : 12 + header_size])
        described = json_text.parse(text)
        if _written(described) != text:  # the digest doesn't cover how it is written
            raise ValueError("it is written in another way")
        shape = shape_of(described)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise RouteFileError(
            f"the header of these routes can't be read ({str(error)[:200]})",
            cause="the bytes were cut short or changed",
        ) from error
    dtype = DTYPES[described["dtype"]]
    body = view[12 + header_size :]
    size = math.prod(shape) * dtype.itemsize
    expected = size + (shape[0] + 7) // 8
    if len(body) != expected:
        raise RouteFileError(
            "these routes are incomplete",
            expected=f"{expected} bytes after the header",
            got=len(body),
            cause="a transfer or a file that was cut short",
        )
    ids = np.frombuffer(body[:size], dtype=dtype).reshape(shape)
    bits = body[size:]
    recorded = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=shape[0]).astype(bool)
    return arguments(described, ids, recorded, bits)


def arguments(
    described: dict[str, Any], ids: Array, recorded: Array, summed: memoryview | None = None
) -> dict[str, Any]:
    """RoutedExperts' keyword arguments from a header and the two arrays, which are held against each other
    and against the checksum.

    Args:
        described: the header, which `shape_of` took.
        ids: [tokens, layers, topk].
        recorded: [tokens].
        summed: `recorded` as the checksum has it, where it isn't a byte a token.

    Raises:
        RouteFileError: they don't go together, or not with the checksum.
    """
    said = *shape_of(described), described["dtype"], "bool", described["tokens"]
    there = *ids.shape, str(ids.dtype), str(recorded.dtype), *recorded.shape
    if there != said:
        raise RouteFileError(
            "the header and the arrays don't agree",
            expected=f"shapes and dtypes {said}",
            got=there,
            cause="a tool that rewrote the tensors",
        )
    found = described.get("digest")
    bare = {name: value for name, value in described.items() if name != "digest"}
    if digest(bare, ids.data, recorded.data if summed is None else summed) != found:
        raise RouteFileError(
            "these routes were changed after they were written",
            expected=f"checksum {found}",
            got="another",
            cause="a damaged disk or transfer, somebody who edited or overwrote them, or a shard of an "
            "earlier job beside an index of a later one",
        )
    return {
        "ids": shared_tensor(ids),
        "layers": described["layers"],
        "num_experts": described["num_experts"],
        "recorded": shared_tensor(recorded),
        "fingerprint": described["fingerprint"],
        "weight_version": described["weight_version"],
        "vouched": described.get("vouched") is True,
    }


def shared_tensor(ids: np.ndarray) -> torch.Tensor:
    """A tensor on numpy's memory, which may be read-only."""
    if ids.flags.writeable:
        return torch.from_numpy(ids)
    # RoutedExperts never writes to its ids, so read-only memory (bytes) can be shared too; torch only
    # warns that it has no notion of that.
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(ids)
