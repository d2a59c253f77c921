"""Encodings of routes that are made by hand, and of which something is other than it should be."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import torch

from npu_replay import RoutedExperts
from npu_replay.routes import encoding


def routes(tokens: int = 5, experts: int = 8, **changes: Any) -> RoutedExperts:
    scores = torch.rand(tokens, 2, experts, generator=torch.Generator().manual_seed(tokens))
    recorded = torch.arange(tokens) != 1
    arguments: dict[str, Any] = {"recorded": recorded, "fingerprint": 2**64 - 1, "weight_version": "v1"}
    arguments |= changes
    return RoutedExperts(ids=scores.topk(2).indices, layers=(1, 4), num_experts=experts, **arguments)


MODEL = {"layers": [1, 4], "topk": 2, "num_experts": 8}
KNOWN = {
    "tokens": 5,
    "fingerprint": 2**64 - 1,
    "weight_version": "v1",
    "constant_layers_ok": False,
    "from_engine": False,
}


IDS = routes().ids.numpy().tobytes()
RECORDED = routes().recorded.numpy().tobytes()


def text(said: Any) -> str:
    return json.dumps(said, separators=(",", ":"))


def digest_of(model: Any, key: str, known: Any, ids: bytes = IDS, recorded: bytes = RECORDED) -> str:
    return hashlib.blake2b(text([model, key, known]).encode() + ids + recorded, digest_size=16).hexdigest()


def forged(
    *,
    model: Any = MODEL,
    known: Any = KNOWN,
    ids: bytes = IDS,
    recorded: bytes = RECORDED,
    key: str = "",
    said: Callable[[str], str] = str,
    routes_said: Callable[[str], str] = str,
    tensors: Any = None,
    **digest: Any,
) -> bytes:
    """An encoding as this library writes it, made by hand, of which something is other; with a right digest
    unless there is another one, or None for none."""
    digest = {"digest": digest_of(model, key, known, ids, recorded)} | digest
    known = known | {name: value for name, value in digest.items() if value is not None}
    end = len(ids)
    entries = tensors or {
        "ids": {"dtype": "U8", "shape": [5, 2, 2], "data_offsets": [0, end]},
        "recorded": {"dtype": "BOOL", "shape": [5], "data_offsets": [end, end + len(recorded)]},
    }
    lists = {name: [value] for name, value in known.items()}
    about = {"format": encoding.FORMAT, "routes": routes_said(text({**model, "keys": [key], **lists}))}
    header = said(text({"__metadata__": about, **entries})).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + ids + recorded
