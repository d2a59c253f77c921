"""Reads routes in a gateway's envelope, which gives the array's shape: {data, shape, dtype, start}.

vLLM's routes behind NVIDIA Dynamo lie in one, in `nvext` of the answer; SGLang's lie there as SGLang wrote
them. prime-rl, verifiers and SkyRL send the same envelope, in the choice or alone. `data` is base64, the
array's own bytes or an array. Two frameworks write the same in other words:

    NeMo-RL  "nrlre1:int16:39x6x8:<base64>", with a row for each token; the last token's is filled
    rLLM     ['{"shape": [6, 8], "dtype": "uint8"}', "<base64>"], in the choice's `routing_matrices`
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from npu_replay.errors import InvalidRoutes, quoted
from npu_replay.rollout.payloads import as_numpy, from_base64
from npu_replay.rollout.release_rules import Source
from npu_replay.routes.checks import Array

_FORM = (
    "{data: base64 or bytes, shape: [tokens, layers, topk], dtype: uint8 to int64, start: of the first row}"
)
_DTYPES = {
    "uint8": "<u1",
    "int8": "<i1",
    "uint16": "<u2",
    "int16": "<i2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
}
MEGATRON = "moe_topk_indices"
"""The field of an answer of Megatron's own inference server."""
_PLACES = (("routed_experts",), ("routing_matrices",), (MEGATRON,), ("message", "routed_experts"))
_NEMO = "nrlre1:"
_NEMO_HEAD = re.compile(_NEMO + r"(\w{1,16}):(\d{1,9})x(\d{1,9})x(\d{1,9}):")
_LONGEST_HEAD = 200  # characters of rLLM's


def is_envelope(value: Any) -> bool:
    """Return whether this is an envelope, whatever is in it."""
    if isinstance(value, Mapping):
        return "data" in value and "shape" in value
    return _is_nemo(value) or (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str))


def _is_nemo(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_NEMO)


def _opened(value: Any, source: Source) -> Mapping[str, Any]:
    """Return an envelope as the mapping that a gateway sends."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        head = _NEMO_HEAD.match(value)
        if head is None:
            raise _other_form(source, quoted(value[:_LONGEST_HEAD]))
        shape = [int(size) for size in head.groups()[1:]]
        return {"dtype": head[1], "shape": shape, "data": value[head.end() :]}
    head_bytes, data = value
    try:
        about = json.loads(head_bytes[:_LONGEST_HEAD])
        (layers, topk) = about["shape"]
        dtype = about["dtype"]
        size = len(data) // 4 * 3 - data[-2:].count("=")
        rows = size // (layers * topk * np.dtype(_DTYPES[dtype]).itemsize)
        return {"dtype": dtype, "shape": [rows, layers, topk], "data": data}
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise _other_form(source, quoted(head_bytes[:_LONGEST_HEAD])) from error


def of_choice(choice: Any) -> tuple[Any, str]:
    """Return a choice's routes, and the name of their field: also as rLLM, Megatron and NeMo-RL name it."""
    for place in _PLACES:
        payload = choice
        for name in place:
            payload = payload.get(name) if isinstance(payload, Mapping) else getattr(payload, name, None)
        if payload is not None:
            return payload, ".".join(place)
    return None, "routed_experts"


def of_gateway(answer: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """Return a field that a gateway put beside the choices, and its place: `nvext` or its `engine_data`."""
    beside = answer.get("nvext")
    if isinstance(beside, Mapping):
        inner = beside.get("engine_data")
        for place, fields in (("nvext", beside), ("nvext.engine_data", inner)):
            if isinstance(fields, Mapping) and fields.get(name) is not None:
                return fields[name], f"{place}.{name}"
    return None, ""


def from_envelope(envelope: Any, *, start: int, due: int, source: Source) -> Array:
    """Read an envelope whose rows begin at `start`, [tokens, layers, topk].

    NeMo-RL's form has one row more than are `due`, which is dropped.
    """
    value = _opened(envelope, source)
    shape = value.get("shape")
    first = value.get("start", start)
    data = as_numpy(value.get("data"))
    if isinstance(shape, tuple):
        shape = list(shape)
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(n) is int and n >= 0 for n in shape):
        raise _other_form(source, f"shape {quoted(shape)}")
    if type(first) is not int or first != start:
        raise source.unreadable(
            "the rows of the envelope begin at another token than this call says",
            f"start={start}",
            f"start {quoted(first)}",
        )
    size = math.prod(shape)
    if isinstance(data, str):
        data = from_base64(data, source=source)
    if isinstance(data, (bytes, bytearray, memoryview)):
        dtype = value.get("dtype")
        if not (isinstance(dtype, str) and dtype in _DTYPES):
            raise _other_form(source, f"dtype {quoted(dtype)}")
        number = np.dtype(_DTYPES[dtype])
        if len(data) != size * number.itemsize:
            raise _cut(source, f"{size * number.itemsize} bytes", len(data))
        data = np.frombuffer(data, number)
    if not (isinstance(data, np.ndarray) and data.dtype.kind in "iu"):
        raise _other_form(source, f"data {quoted(data)}")
    if data.size != size:
        raise _cut(source, f"{size} ids, as its shape says", data.size)
    rows = data.reshape(shape)
    return rows[:due] if _is_nemo(envelope) and len(rows) == due + 1 else rows


def _cut(source: Source, expected: str, got: int) -> InvalidRoutes:
    return source.unreadable("the envelope was cut short or lengthened", expected, got)


def _other_form(source: Source, got: str) -> InvalidRoutes:
    return source.unreadable("the routes are there, in an envelope of an unknown form", _FORM, got)
