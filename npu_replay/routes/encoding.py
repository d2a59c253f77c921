"""Encodes routes in the safetensors layout and decodes them, as bytes, as a file or as a shard of a store.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces to a multiple of 8 bytes; its metadata hold the format and `routes`
    ids       [tokens, layers, topk] of all samples, uint8 or little-endian int16
    recorded  [tokens] of all samples, one byte per token, 0 or 1

`routes` is JSON: the model, and the fields of each sample by its key. `micro_batch` says which tokens a
micro-batch belongs to. The last field is a digest: BLAKE2b (16 bytes) over the model, the sample's fields
and its two arrays. A reader encodes the header that it read again, and refuses a text that differs in any
byte; so wrong offsets, shapes and dtypes, and repeated names, need no rule of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from npu_replay.errors import ReplayError, RouteFileError
from npu_replay.routes.arguments import shared_tensor
from npu_replay.routes.checks import Array
from npu_replay.routes.inputs import Inputs

FORMAT = "npu_replay.routes.5"
Read: TypeAlias = "Callable[[int, int], Array]"
"""Returns the bytes from one place to before another, uint8."""

_CARRIED = ("fingerprint", "weight_version", "constant_layers_ok", "from_engine")


class Header:
    """Holds the header of samples of one model; `text` is empty for one that was read."""

    def __init__(self, model: dict[str, Any], samples: dict[str, dict[str, Any]]) -> None:
        self.model = model
        self.samples = samples
        dtype, self._dtype = ("U8", "u1") if model["num_experts"] <= 256 else ("I16", "<i2")
        self._columns = [len(model["layers"]), model["topk"]]
        self._row = self._columns[0] * self._columns[1] * np.dtype(self._dtype).itemsize
        *first, tokens = accumulate((known["tokens"] for known in samples.values()), initial=0)
        self._first = dict(zip(samples, first, strict=True))
        ids = tokens * self._row
        # All masks come after all ids: an int16 at an odd address is slow.
        tensors = {
            "ids": {"dtype": dtype, "shape": [tokens, *self._columns], "data_offsets": [0, ids]},
            "recorded": {"dtype": "BOOL", "shape": [tokens], "data_offsets": [ids, ids + tokens]},
        }
        about = {"format": FORMAT, "routes": _json({**model, "samples": samples})}
        text = _json({"__metadata__": about, **tensors}).encode()
        text += b" " * (-len(text) % 8)
        self.text = len(text).to_bytes(8, "little") + text
        self._ids, self._recorded = len(self.text), len(self.text) + ids
        self.size = self._recorded + tokens

    @classmethod
    def read(cls, read: Read, size: int) -> Header:
        """Read the header of `size` bytes; call it inside `read_errors_as`."""
        end = 8 + int.from_bytes(read(0, min(8, size)).tobytes(), "little")
        if end > size:
            raise ValueError("its header is cut short, or it isn't in the safetensors layout")
        text = read(0, end).tobytes()
        about = json.loads(text[8:]).get("__metadata__") or {}
        format_name = about.get("format")
        RouteFileError.unless(
            format_name == FORMAT,
            "this doesn't hold routes",
            expected=f"metadata format {FORMAT!r}",
            got=format_name,
            cause="safetensors of something else (a checkpoint?), or of another version of npu_replay",
        )
        model = json.loads(about["routes"])
        samples = model.pop("samples")
        header = cls(model, samples)
        # Encoded again: any difference, to the byte, is damage or another format.
        if header.text != text:
            raise ValueError("its header isn't the one that npu_replay writes for these routes")
        if header.size != size:
            raise ValueError(f"it is {size} bytes long, and its header says {header.size}")
        header.text = b""  # not needed any more; a store keeps the headers of all shards
        return header

    def arguments(self, read: Read, key: str = "") -> dict[str, Any]:
        """Return the values of one sample, checked by its digest; call it in `read_errors_as`.

        They are RoutedExperts' arguments, and as `micro_batch` the values of a placement.
        """
        RouteFileError.unless(
            key in self.samples,
            "this sample isn't here",
            expected=f"the sample {key}"
            if key
            else "one sample without a key, as save() and to_bytes() write it",
            got=f"{len(self.samples)} others",
            cause="a shard of a RouteStore, which is read by its folder",
        )
        known = self.samples[key]
        tokens = known["tokens"]
        first = self._first[key]
        start = self._ids + first * self._row
        mask = self._recorded + first
        ids = read(start, start + tokens * self._row).view(self._dtype).reshape(tokens, *self._columns)
        recorded = read(mask, mask + tokens)
        if _digest(self.model, key, known, ids, recorded) != known["digest"]:
            raise RouteFileError(
                "these routes were changed after they were written",
                cause="a damaged disk or transfer, or somebody who edited or overwrote them",
            )
        return {
            **{name: self.model[name] for name in ("layers", "num_experts")},
            **{name: known[name] for name in _CARRIED},
            "ids": shared_tensor(ids),
            "recorded": shared_tensor(recorded.view(np.bool_)),
            "micro_batch": _read_micro_batch(known["micro_batch"]),
        }


def decode(read: Read, size: int) -> dict[str, Any]:
    """Return the values of a sample without a key, as `Header.arguments` does, inside `read_errors_as`."""
    return Header.read(read, size).arguments(read)


def encode(samples: Mapping[str, Mapping[str, Any]]) -> list[bytes | memoryview]:
    """Return the header, all samples' ids and all masks, uncopied; `samples` are RoutedExperts' arguments."""
    model = dict[str, Any]()
    described = dict[str, dict[str, Any]]()
    for key, sample in samples.items():
        model = {
            "layers": [*sample["layers"]],
            "topk": sample["ids"].shape[2],
            "num_experts": sample["num_experts"],
        }
        known = {"tokens": len(sample["ids"]), **{name: sample[name] for name in _CARRIED}}
        known["micro_batch"] = _described_micro_batch(sample["placement"])
        described[key] = known | {"digest": _digest(model, key, known, sample["ids"], sample["recorded"])}
    text = Header(model, described).text
    arrays = (sample[what] for what in ("ids", "recorded") for sample in samples.values())
    return [text, *(array.reshape(-1).view(np.uint8).data for array in arrays)]


@contextmanager
def read_errors_as(problem: str, cause: str, where: object = "") -> Iterator[None]:
    """Raise an error of the block, which reads data from outside, as a RouteFileError."""
    try:
        yield
    except ReplayError as error:
        raise error.at(where) from error.__cause__
    except FileNotFoundError as error:
        raise RouteFileError("there is no such file", where=str(where)) from error
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError, RecursionError),
    ) as error:
        reason = error if isinstance(error, (OSError, ValueError)) else repr(error)
        raise RouteFileError(f"{problem} ({reason})", where=str(where), cause=cause) from error


def _digest(model: dict[str, Any], key: str, known: dict[str, Any], ids: Array, recorded: Array) -> str:
    about = [model, key, {name: known[name] for name in known if name != "digest"}]
    summed = hashlib.blake2b(_json(about).encode(), digest_size=16)
    summed.update(ids.data)
    summed.update(recorded.data)
    return summed.hexdigest()


def _described_micro_batch(placement: Any) -> dict[str, Any]:
    inputs = None if placement.inputs is None else placement.inputs.described()
    return {"row_order": placement.row_order, "inputs": inputs, "unnamed": placement.unnamed}


def _read_micro_batch(known: dict[str, Any]) -> dict[str, Any]:
    return known | {"inputs": None if known["inputs"] is None else Inputs.read(known["inputs"])}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
