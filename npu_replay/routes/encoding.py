"""Encodes routes in the safetensors layout, and decodes them: as bytes, as a file, as a shard of a store.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces to a multiple of 8 bytes
    ids       of each sample, [tokens, layers, topk], uint8 or little-endian int16
    recorded  of each sample, [tokens], a byte a token, 0 or 1

The tensors of a sample are KEY.ids and KEY.recorded; those of a sample without a key are ids and recorded.
The metadata have the format and, as JSON in `routes`, the model of all samples and what is known of each,
with a digest: BLAKE2b (16 bytes) over both and the sample's two arrays.

A reader writes the header that it understood once more, and refuses a text that isn't the same to the byte.
So wrong offsets, shapes and dtypes, unknown keys and keys that stand twice need no rule of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from npu_replay.errors import ReplayError, RouteFileError, shown
from npu_replay.routes.arguments import shared_tensor
from npu_replay.routes.atomic_file import plain_file, reader
from npu_replay.routes.checks import MAX_EXPERTS, MAX_LAYERS, Array

FORMAT = "npu_replay.routes.2"
Read: TypeAlias = "Callable[[int, int], Array]"
"""Returns the bytes between two places, uint8."""

_LONGEST_HEADER = 100_000_000  # that of the safetensors package
_OTHER_HEADER = "its header isn't the one that npu_replay writes for these routes"


class Header:
    """The header of samples of one model.

    Args:
        model: layers, topk and num_experts.
        samples: by key, tokens, fingerprint, weight_version, constant_layers_ok, from_engine and digest.

    Attributes:
        text: as it is written, with its length.
        size: bytes of the text and of all arrays.
    """

    def __init__(self, model: dict[str, Any], samples: dict[str, dict[str, Any]]) -> None:
        self.model, self.samples = model, samples
        dtype, self._dtype = ("U8", "u1") if model["num_experts"] <= 256 else ("I16", "<i2")
        columns = [len(model["layers"]), model["topk"]]
        row = columns[0] * columns[1] * np.dtype(self._dtype).itemsize
        tensors, end = dict[str, Any](), 0
        for key, known in samples.items():
            place, shape = [end, end := end + known["tokens"] * row], [known["tokens"], *columns]
            tensors[_tensor(key, "ids")] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        for key, known in samples.items():  # after all ids: an int16 at an odd place is slow
            place, shape = [end, end := end + known["tokens"]], [known["tokens"]]
            tensors[_tensor(key, "recorded")] = {"dtype": "BOOL", "shape": shape, "data_offsets": place}
        self._tensors = tensors
        about = {"format": FORMAT, "routes": _json([model, samples])}
        text = _json({"__metadata__": about, **tensors}).encode()
        text += b" " * (-len(text) % 8)
        self.text = len(text).to_bytes(8, "little") + text
        self.size = len(self.text) + end

    @classmethod
    def read(cls, read: Read, size: int) -> Header:
        """Read the header of `size` bytes; call it while `reading`."""
        end = 8 + int.from_bytes(read(0, min(8, size)).tobytes(), "little")
        if end > min(size, 8 + _LONGEST_HEADER):
            raise ValueError("its header is cut short, or it isn't in the safetensors layout")
        text = read(0, end).tobytes()
        about = json.loads(text[8:]).get("__metadata__") or {}
        RouteFileError.unless(
            about.get("format") == FORMAT,
            "this doesn't hold routes",
            f"metadata format {FORMAT!r}",
            about.get("format"),
            "safetensors of something else (a checkpoint?), or of another version of npu_replay",
        )
        model, samples = json.loads(about["routes"])
        _check([model], _MODEL)
        _check(samples.values(), _SAMPLE)
        found = cls(model, samples)
        if found.text != text:
            raise ValueError(_OTHER_HEADER)
        if found.size != size:
            raise ValueError(f"it is {size} bytes long, and its header says {found.size}")
        return found

    def arguments(self, read: Read, key: str = "") -> dict[str, Any]:
        """Return RoutedExperts' arguments of one sample; call it while `reading`.

        Raises:
            RouteFileError: the arrays aren't those that the digest is of.
        """
        RouteFileError.unless(
            key in self.samples,
            "this sample isn't here",
            f"the sample {key}" if key else "one sample without a key, as save() and to_bytes() write it",
            f"{len(self.samples)} others",
            "a shard of a RouteStore, which is read by its folder, or one that was replaced",
        )
        known = self.samples[key]
        ids = self._array(read, _tensor(key, "ids"), self._dtype)
        recorded = self._array(read, _tensor(key, "recorded"), "u1")
        RouteFileError.unless(
            _digest(self.model, known, ids, recorded) == known["digest"],
            "these routes were changed after they were written",
            f"checksum {known['digest']}",
            "another",
            "a damaged disk or transfer, or somebody who edited or overwrote them",
        )
        if (recorded > 1).any():
            raise ValueError("recorded isn't a mask")
        about = {name: known[name] for name in _CARRIED}
        about |= {name: self.model[name] for name in ("layers", "num_experts")}
        return about | {"ids": shared_tensor(ids), "recorded": shared_tensor(recorded.view(np.bool_))}

    def _array(self, read: Read, name: str, dtype: str) -> Array:
        first, end = (len(self.text) + place for place in self._tensors[name]["data_offsets"])
        return read(first, end).view(dtype).reshape(self._tensors[name]["shape"])


def encode(samples: Mapping[str, Mapping[str, Any]]) -> list[bytes | memoryview]:
    """Return the header, the ids of all samples and their masks; the arrays aren't copied.

    Args:
        samples: by key, RoutedExperts' arguments with contiguous numpy arrays; all of one model.

    Raises:
        RouteFileError: the header would be one that nobody reads.
    """
    model, described = dict[str, Any](), dict[str, dict[str, Any]]()
    for key, one in samples.items():
        model = {"layers": [*one["layers"]], "topk": one["ids"].shape[2], "num_experts": one["num_experts"]}
        known = {"tokens": len(one["ids"]), **{name: one[name] for name in _CARRIED}}
        described[key] = known | {"digest": _digest(model, known, one["ids"], one["recorded"])}
    arrays = [
        one[what].reshape(-1).view(np.uint8) for what in ("ids", "recorded") for one in samples.values()
    ]
    text = Header(model, described).text
    fits, cause = len(text) <= 8 + _LONGEST_HEADER, "keys or weight versions that are long texts"
    RouteFileError.unless(fits, "the header is too long", f"{_LONGEST_HEADER} bytes", len(text) - 8, cause)
    return [text, *(one.data for one in arrays)]


def from_buffer(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return RoutedExperts' arguments, whose ids lie in `data`; call it while `reading`."""
    whole = np.frombuffer(data, np.uint8)

    def read(first: int, end: int) -> Array:
        return whole[first:end]

    return Header.read(read, len(whole)).arguments(read)


def from_file(path: Path) -> dict[str, Any]:
    """The same of a file, in memory of their own; call it while `reading`."""
    with plain_file(path) as file:  # opened once: whoever overwrites it puts another file there
        read = reader(file)
        return Header.read(read, os.fstat(file.fileno()).st_size).arguments(read)


@contextmanager
def reading(problem: str, cause: str, where: object = "") -> Iterator[None]:
    """Raise what goes wrong in the block, where somebody else's data are read, as a RouteFileError."""
    try:
        yield
    except ReplayError as error:
        raise error.at(where) from error.__cause__
    except FileNotFoundError as error:
        raise RouteFileError("there is no such file", where=str(where)) from error
    except RecursionError as error:
        raise RouteFileError(f"{problem} (it is nested too deeply)", where=str(where), cause=cause) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        said = error if isinstance(error, (OSError, ValueError)) else repr(error)
        raise RouteFileError(f"{problem} ({said})", where=str(where), cause=cause) from error


def _digest(model: dict[str, Any], known: dict[str, Any], ids: Array, recorded: Array) -> str:
    about = [model, {name: known[name] for name in known if name != "digest"}]
    summed = hashlib.blake2b(_json(about).encode(), digest_size=16)
    summed.update(ids.data)
    summed.update(recorded.data)
    return summed.hexdigest()


def _tensor(key: str, what: str) -> str:
    return f"{key}.{what}" if key else what


def _json(said: Any) -> str:
    return json.dumps(said, separators=(",", ":"))


# What a header says: of each value its types, and between what a number lies

_Field: TypeAlias = "tuple[set[type], int, int]"

_CARRIED: dict[str, _Field] = {
    "fingerprint": ({int, type(None)}, 0, (1 << 64) - 1),
    "weight_version": ({int, str, type(None)}, -(1 << 64), 1 << 64),
    "constant_layers_ok": ({bool}, 0, 1),
    "from_engine": ({bool}, 0, 1),
}
_SAMPLE: dict[str, _Field] = {"tokens": ({int}, 0, 1 << 48), **_CARRIED, "digest": ({str}, 0, 0)}
_MODEL: dict[str, _Field] = {
    "layers": ({list}, 0, MAX_LAYERS - 1),
    "topk": ({int}, 1, MAX_EXPERTS),
    "num_experts": ({int}, 1, MAX_EXPERTS),
}


def _check(said: Collection[dict[str, Any]], fields: Mapping[str, _Field]) -> None:
    """Refuse what a header may not say; a field of all samples at a time, as that is fast."""
    for one in said:
        if [*one] != [*fields]:
            raise ValueError(next((f"no {name}" for name in fields if name not in one), _OTHER_HEADER))
    for name, (types, least, most) in fields.items():
        values = [one[name] for one in said]
        wrong = [value for value in values if type(value) not in types]
        parts = [part for value in values if type(value) is list for part in value]
        numbers = [number for number in [*values, *parts] if type(number) is int]
        wrong += [part for part in parts if type(part) is not int]
        if numbers and not least <= min(numbers) <= max(numbers) <= most:
            wrong.append(max(numbers, key=abs))
        if wrong:
            raise ValueError(f"{name} {shown(wrong[0])}")
