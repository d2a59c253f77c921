"""What RoutedExperts look like outside a process: a header and two arrays, as bytes, as a file, in a store.

Bytes describe themselves:

    8 bytes   magic and version, b"NPUROUT1"
    4 bytes   length of the header, little-endian
    header    JSON: tokens, layers, topk, num_experts, dtype, fingerprint, weight_version, digest; vouched and
              from_engine, where they are true
    ids       [tokens, layers, topk], row-major, little-endian
    recorded  one bit a token, numpy.packbits

A file is safetensors: the tensors `ids` and `recorded` (a byte a token), and in its metadata the format and
the header. A shard of a store has such tensors for each sample, and the headers lie in its index. The digest
is BLAKE2b (16 bytes) over the header without it, the ids and `recorded` as it is written there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from npu_replay import json_text
from npu_replay.errors import ReplayError, RouteFileError
from npu_replay.routes.atomic_file import as_path, plain_file, write_whole
from npu_replay.routes.checks import MAX_EXPERTS, MAX_LAYERS, Array

if TYPE_CHECKING:
    from npu_replay.routes.routed_experts import RoutedExperts

MAGIC = b"NPUROUT1"
FORMAT = "npu_replay.routes.1"
DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "int16": np.dtype("<i2")}
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError)
"""What reading a file of somebody else's may raise."""

_MARKS = ("vouched", "from_engine")
_TENSORS: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I16": np.dtype("<i2"), "BOOL": np.dtype("bool")}
_LONGEST_HEADER = 100_000_000  # that of the safetensors package


@contextmanager
def reading(problem: str, cause: str, where: object = "") -> Iterator[None]:
    """What goes wrong in the block while somebody else's data are read is a RouteFileError; an error of ours
    learns where it was."""
    try:
        yield
    except ReplayError as error:
        raise error.at(where) from error.__cause__
    except UNREADABLE as error:
        said = error if isinstance(error, (OSError, ValueError)) else repr(error)
        raise RouteFileError(f"{problem} ({said})", where=str(where), cause=cause) from error


# The header


def header(routes: RoutedExperts) -> dict[str, Any]:
    """What has to be known beside the arrays, without the digest."""
    return {
        "tokens": len(routes),
        "layers": list(routes.layers),
        "topk": routes.topk,
        "num_experts": routes.num_experts,
        "dtype": str(routes.ids.dtype).removeprefix("torch."),
        "fingerprint": routes.fingerprint,
        "weight_version": routes.weight_version,
        **{mark: True for mark in _MARKS if getattr(routes, mark)},
    }


def signed_header(routes: RoutedExperts, recorded: bytes) -> dict[str, Any]:
    """The header with the digest; `recorded` as it is written."""
    said = header(routes)
    return said | {"digest": digest(said, routes.ids.contiguous().numpy().data, recorded)}


def as_tensors(routes: RoutedExperts, prefix: str = "") -> tuple[dict[str, Array], dict[str, Any]]:
    """The two arrays as they lie in a file, by name, and the header."""
    ids, recorded = routes.ids.contiguous().numpy(), routes.recorded.contiguous().numpy()
    header = signed_header(routes, recorded.tobytes())
    return {f"{prefix}ids": ids, f"{prefix}recorded": recorded}, header


def digest(said: dict[str, Any], ids: memoryview | bytes, recorded: memoryview | bytes) -> str:
    """The checksum of a header, which may have one already, and its arrays."""
    bare = {name: value for name, value in said.items() if name != "digest"}
    summed = hashlib.blake2b(_written(bare), digest_size=16)
    summed.update(ids)
    summed.update(recorded)
    return summed.hexdigest()


def _written(said: dict[str, Any]) -> bytes:
    try:
        return json.dumps(said, sort_keys=True).encode()
    except RecursionError as error:  # what was just within the limit when it was read
        raise ValueError("it is nested too deeply") from error


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    """A whole number, and no bool, which Python takes for one."""
    return lambda value: type(value) is int and least <= value <= most


def _are_labels(value: Any) -> bool:
    return (
        type(value) is list
        and {*map(type, value)} <= {int}
        and -1 < min(value, default=0) <= max(value, default=0) < MAX_LAYERS
    )


FIELDS: dict[str, Callable[[Any], bool]] = {
    "tokens": _whole(0, 1 << 48),
    "layers": _are_labels,
    "topk": _whole(1, MAX_EXPERTS),
    "num_experts": _whole(1, MAX_EXPERTS),
    "dtype": lambda value: type(value) is str and value in DTYPES,
    "fingerprint": lambda value: value is None or _whole(0, (1 << 64) - 1)(value),
    "weight_version": lambda value: value is None or type(value) in (int, str),
    "digest": lambda value: type(value) is str,
}
"""What a header has to say, and what may stand there."""


def check_header(said: Any, optional: Container[str] = ()) -> None:
    """ValueError or TypeError for a header that lacks something, or says what nobody can mean."""
    for name, fits in FIELDS.items():
        if name in said:
            if not fits(said[name]):
                raise ValueError(f"{name} {str(said[name])[:80]!r}")
        elif name not in optional:
            raise ValueError(f"no {name}")


def shape_of(said: dict[str, Any]) -> tuple[int, int, int]:
    """[tokens, layers, topk], of a header that was checked."""
    return said["tokens"], len(said["layers"]), said["topk"]


def verified(
    said: dict[str, Any], ids: Array, recorded: Array, summed: memoryview | None = None
) -> dict[str, Any]:
    """RoutedExperts' arguments, of a header and the two arrays held against each other and the digest.

    Args:
        said: a header that was checked; one without a digest is of routes that are sealed otherwise.
        ids: [tokens, layers, topk].
        recorded: [tokens].
        summed: `recorded` as the digest has it, where that isn't a byte a token.

    Raises:
        RouteFileError: they don't go together, or not with the digest.
    """
    shape, dtype = shape_of(said), DTYPES[said["dtype"]]
    RouteFileError.unless(
        (ids.shape, ids.dtype, recorded.shape, recorded.dtype) == (shape, dtype, shape[:1], np.bool_),
        "the header and the arrays don't agree",
        f"{dtype} {list(shape)} and bool [{shape[0]}]",
        f"{ids.dtype} {list(ids.shape)} and {recorded.dtype} {list(recorded.shape)}",
        "a tool that rewrote the tensors",
    )
    wanted = said.get("digest")
    RouteFileError.unless(
        wanted is None or digest(said, ids.data, recorded.data if summed is None else summed) == wanted,
        "these routes were changed after they were written",
        f"checksum {wanted}",
        "another",
        "a damaged disk or transfer, somebody who edited or overwrote them, or a shard of an earlier job "
        "beside an index of a later one",
    )
    return {
        "ids": shared_tensor(ids),
        "layers": said["layers"],
        "num_experts": said["num_experts"],
        "recorded": shared_tensor(recorded),
        "fingerprint": said["fingerprint"],
        "weight_version": said["weight_version"],
        **{mark: said.get(mark) is True for mark in _MARKS},
    }


def shared_tensor(array: Array) -> torch.Tensor:
    """A tensor on numpy's memory; where that is read-only, torch only warns that it knows no such thing, and
    RoutedExperts never writes to its ids."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


# Bytes


def to_buffers(routes: RoutedExperts) -> tuple[bytes, memoryview, bytes]:
    """Header, ids and recorded bits; the ids share memory with the routes."""
    ids = routes.ids.contiguous().numpy().data.cast("B") if routes.ids.numel() else memoryview(b"")
    recorded = np.packbits(routes.recorded.numpy()).tobytes()
    text = _written(signed_header(routes, recorded))
    return MAGIC + len(text).to_bytes(4, "little") + text, ids, recorded


def from_bytes(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """RoutedExperts' arguments; the ids share memory with `data`."""
    try:
        view = memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise RouteFileError(
            "these aren't bytes", expected="contiguous bytes, as to_bytes() makes them", got=type(data)
        ) from error
    expected, cause = f"the first 8 bytes to be {MAGIC!r}", "another format, or another version of npu_replay"
    RouteFileError.unless(view[:8] == MAGIC, "these bytes aren't routes", expected, bytes(view[:8]), cause)
    with reading("the header of these routes can't be read", "the bytes were cut short or changed"):
        start = 12 + int.from_bytes(view[8:12], "little")
        text = bytes(view[12:start])
        said = json_text.parse(text)
        if _written(said) != text:  # the digest doesn't cover how it is written
            raise ValueError("it is written in another way")
        check_header(said)
    shape, dtype = shape_of(said), DTYPES[said["dtype"]]
    end = start + math.prod(shape) * dtype.itemsize
    bits, whole = view[end:], end + (shape[0] + 7) // 8
    expected, cause = f"{whole - start} bytes after the header", "a transfer or a file that was cut short"
    fine, got = len(view) == whole, len(view) - start
    RouteFileError.unless(fine, "these routes are incomplete", expected, got, cause)
    ids = np.frombuffer(view[start:end], dtype).reshape(shape)
    recorded = np.unpackbits(np.frombuffer(bits, np.uint8), count=shape[0]).astype(bool)
    return verified(said, ids, recorded, bits)


# Files


def safetensors_bytes() -> Callable[[dict[str, Array], dict[str, str]], bytes]:
    """How arrays and metadata are written; RouteFileError, with what to do, without safetensors."""
    try:
        from safetensors.numpy import save  # torch's refuses samples that share memory (`only`, `sequence`)
    except ImportError as error:
        raise RouteFileError(
            "writing files of routes needs the package safetensors",
            cause="the core is installed without its extras: pip install 'npu-replay[files]', or use "
            "to_bytes() and from_bytes(), which need nothing",
        ) from error
    return save


def write_file(routes: RoutedExperts, path: Any, *, overwrite: bool) -> None:
    """Write `routes` to `path`, whole or not at all."""
    path, save = as_path(path), safetensors_bytes()
    tensors, said = as_tensors(routes)
    about = {"format": FORMAT, "routes": json.dumps(said, sort_keys=True)}
    write_whole(path, save(tensors, about), overwrite=overwrite)


def from_file(path: Path) -> dict[str, Any]:
    """RoutedExperts' arguments; to be called while `reading`."""
    try:
        with plain_file(path) as file:  # opened once: whoever overwrites it puts another file there
            tensors = TensorFile(file)
            found = tensors.metadata.get("format")
            RouteFileError.unless(
                found == FORMAT,
                "this safetensors file doesn't hold routes",
                f"metadata format {FORMAT!r}",
                found,
                "a file of something else (a checkpoint?), or of another version of npu_replay",
            )
            said = json_text.parse(tensors.metadata["routes"])
            check_header(said)
            ids, recorded = tensors.arrays(file, "ids", "recorded")
    except FileNotFoundError as error:
        raise RouteFileError("there is no such file") from error
    return verified(said, ids, recorded)


class TensorFile:
    """The header of an open safetensors file, and where its arrays are. Use it while `reading`.

    A memory map would show what the file holds at the moment: whoever writes to it changes ids that were held
    against their checksum before, and where it has shrunk the process dies of a signal.
    """

    def __init__(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        length = int(_exactly(file, 8).view("<u8")[0])
        if length > min(size - 8, _LONGEST_HEADER):
            raise ValueError("its header is cut short, or it isn't a safetensors file")
        said = json_text.parse(_exactly(file, length).tobytes())
        self.metadata: dict[str, str] = said.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in self.metadata.values()):
            raise ValueError("its metadata aren't text")
        self._tensors = {name: _checked_tensor(one) for name, one in said.items()}
        self._start, end = 8 + length, 0
        for first, its_end in sorted(tuple(one["data_offsets"]) for one in self._tensors.values()):
            if first != end:
                raise ValueError("its tensors overlap, or leave holes")
            end = its_end
        if self._start + end != size:
            raise ValueError(f"it is {size} bytes long, and its header says {self._start + end}")

    def arrays(self, file: BinaryIO, *names: str) -> Iterator[Array]:
        """Read these arrays of the file that the header is of, each into memory of its own."""
        for name in names:
            said = self._tensors[name]
            if said["dtype"] not in _TENSORS:
                raise ValueError(f"{name} is of dtype {said['dtype']}")
            first, end = said["data_offsets"]
            file.seek(self._start + first)
            found = _exactly(file, end - first)
            if said["dtype"] == "BOOL" and found.size and int(found.max()) > 1:
                raise ValueError(f"{name} isn't a mask")
            yield found.view(_TENSORS[said["dtype"]]).reshape(said["shape"])


def _checked_tensor(said: dict[str, Any]) -> dict[str, Any]:
    dtype, shape, (first, end) = said["dtype"], said["shape"], said["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, end)) or end < first:
        raise ValueError(f"a tensor with shape {shape} at {first} to {end}")
    if dtype in _TENSORS and math.prod(shape) * _TENSORS[dtype].itemsize != end - first:
        raise ValueError(f"{end - first} bytes for a tensor of shape {shape}")
    return said


def _exactly(file: BinaryIO, size: int) -> Array:
    """So many bytes from here on, in memory of our own."""
    found = np.empty(size, np.uint8)
    there = 0
    while there < size and (read := file.readinto(found[there:].data)):  # type: ignore[attr-defined]
        there += read
    if there < size:
        raise ValueError(f"it ends {size - there} bytes early: it was cut short, or somebody writes to it")
    return found
