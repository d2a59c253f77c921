"""The wire form of RoutedExperts: a byte string that describes itself.

    8 bytes   magic and version, b"NPUROUT1"
    4 bytes   length of the header, little-endian
    header    JSON: tokens, layers, topk, num_experts, dtype, fingerprint, weight_version, digest
    ids       [tokens, layers, topk], row-major, little-endian
    recorded  one bit a token, numpy.packbits

The digest is BLAKE2b (16 bytes) over the header without it, the ids and the recorded bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from npu_replay.errors import RouteFileError

if TYPE_CHECKING:
    from npu_replay.routed_experts import RoutedExperts

MAGIC = b"NPUROUT1"
_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2")}


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
    }


def shape_of(described: dict[str, Any]) -> tuple[int, int, int]:
    """[tokens, layers, topk], from a header that may hold anything; ValueError, KeyError or TypeError.

    After it nothing that `arguments` takes is missing, and numpy has the dtype.
    """
    missing = [name for name in ("num_experts", "fingerprint", "weight_version") if name not in described]
    if missing or described["dtype"] not in _DTYPES:
        raise ValueError(f"no {' and no '.join(missing)}" if missing else f"dtype {described['dtype']!r}")
    tokens, layers, topk = described["tokens"], len(described["layers"]), described["topk"]
    if not all(isinstance(length, int) and length >= 0 for length in (tokens, topk)):
        raise ValueError(f"tokens {tokens!r}, top-k {topk!r}")
    return tokens, layers, topk


def digest(described: dict[str, Any], ids: memoryview | bytes, recorded: memoryview | bytes) -> str:
    """The checksum that both the wire form and the file carry."""
    summed = hashlib.blake2b(_written(described), digest_size=16)
    summed.update(ids)
    summed.update(recorded)
    return summed.hexdigest()


def _written(described: dict[str, Any]) -> bytes:
    return json.dumps(described, sort_keys=True).encode()


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
    except TypeError as error:
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
        described = json.loads(text)
        if _written(described) != text:  # the digest doesn't cover how it is written
            raise ValueError(text)
        shape = shape_of(described)
        dtype = _DTYPES[described["dtype"]]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RouteFileError(
            "the header of these routes can't be read", cause="the bytes were cut short or changed"
        ) from error
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
    found = described.pop("digest", None)
    if digest(described, body[:size], body[size:]) != found:
        raise RouteFileError(
            "these routes were changed after they were written",
            expected=f"checksum {found}",
            got="another",
            cause="a damaged transfer, or somebody edited the bytes",
        )
    ids = np.frombuffer(body[:size], dtype=dtype).reshape(shape)
    recorded = np.unpackbits(np.frombuffer(body[size:], dtype=np.uint8), count=shape[0]).astype(bool)
    return arguments(described, shared_tensor(ids), torch.from_numpy(recorded))


def arguments(described: dict[str, Any], ids: torch.Tensor, recorded: torch.Tensor) -> dict[str, Any]:
    """RoutedExperts' keyword arguments from a header and the two arrays."""
    return {
        "ids": ids,
        "layers": described["layers"],
        "num_experts": described["num_experts"],
        "recorded": recorded,
        "fingerprint": described["fingerprint"],
        "weight_version": described["weight_version"],
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
