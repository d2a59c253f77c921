"""The wire form: what comes back is what went in, or a ReplayError."""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_replay import ReplayError, RoutedExperts
from npu_replay.errors import InvalidRoutes, RouteFileError
from npu_replay.routes.serialization import MAGIC, digest, header


def routes(tokens: int = 5, experts: int = 8, **changes: Any) -> RoutedExperts:
    scores = torch.rand(tokens, 2, experts, generator=torch.Generator().manual_seed(tokens))
    recorded = torch.arange(tokens) != 1
    arguments: dict[str, Any] = {"recorded": recorded, "fingerprint": 2**64 - 1, "weight_version": "v1"}
    arguments |= changes
    return RoutedExperts(ids=scores.topk(2).indices, layers=(1, 4), num_experts=experts, **arguments)


@st.composite
def any_routes(draw: st.DrawFn) -> RoutedExperts:
    tokens, layers = draw(st.integers(0, 20)), draw(st.integers(1, 4))
    experts = draw(st.sampled_from([1, 2, 8, 255, 256, 257, 32_767]))
    topk = draw(st.integers(1, min(experts, 4)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    first = random.integers(experts, size=(tokens, layers, 1))
    return RoutedExperts(
        ids=(first + np.arange(topk)) % experts,
        layers=sorted(draw(st.sets(st.integers(0, 200), min_size=layers, max_size=layers))),
        num_experts=experts,
        recorded=random.random(tokens) < draw(st.sampled_from([0.0, 0.5, 1.0])),
        fingerprint=draw(st.none() | st.integers(0, 2**64 - 1)),
        weight_version=draw(st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8)),
    )


@given(any_routes())
@settings(max_examples=100, deadline=None)
def test_what_comes_back_is_what_went_in(before: RoutedExperts) -> None:
    after = RoutedExperts.from_bytes(before.to_bytes())
    assert after == before
    assert after.ids.dtype == before.ids.dtype
    assert after.to_bytes() == before.to_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_bytes_are_read(kind: Any) -> None:
    assert RoutedExperts.from_bytes(kind(routes().to_bytes())) == routes()


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("experts", [8, 256])
def test_the_ids_are_not_copied(kind: Any, experts: int) -> None:
    data = kind(routes(experts=experts, recorded=None).to_bytes())
    start = np.frombuffer(data, np.uint8).ctypes.data
    read = RoutedExperts.from_bytes(data)
    assert start <= read.ids.data_ptr() < start + len(data)


def test_two_byte_ids_are_not_copied_either() -> None:
    data = routes(experts=300, recorded=None).to_bytes()
    padded = bytearray(len(data) + 1)
    for offset in (0, 1):  # int16 at an odd address too
        padded[offset : offset + len(data)] = data
        read = RoutedExperts.from_bytes(memoryview(padded)[offset : offset + len(data)])
        assert read == routes(experts=300, recorded=None)
        start = np.frombuffer(padded, np.uint8).ctypes.data
        assert start <= read.ids.data_ptr() < start + len(padded)


def test_the_size_is_the_ids_and_one_bit_a_token() -> None:
    """What a header costs is paid once, not for every token."""
    small, large = (len(routes(tokens=tokens).to_bytes()) for tokens in (1000, 9000))
    assert large - small == 8000 * 2 * 2 + 8000 // 8


def test_bytes_cut_short_at_any_place_are_refused() -> None:
    data = routes().to_bytes()
    for length in range(len(data)):
        with pytest.raises(RouteFileError):
            RoutedExperts.from_bytes(data[:length])


def test_bytes_with_more_after_them_are_refused() -> None:
    with pytest.raises(RouteFileError, match="incomplete"):
        RoutedExperts.from_bytes(routes().to_bytes() + b"\0")


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x29, 0x80, 0xFF])  # 0x29 makes a tab of a space
def test_one_changed_byte_anywhere_is_refused(flip: int) -> None:
    data = routes(tokens=8).to_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= flip
        with pytest.raises(ReplayError):
            RoutedExperts.from_bytes(changed)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_several_changed_bytes_are_refused(data: st.DataObject) -> None:
    good = routes().to_bytes()
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    if changed == good:
        return
    with pytest.raises(ReplayError):
        RoutedExperts.from_bytes(changed)


@pytest.mark.parametrize(
    "foreign", [b"", b"\0" * 1000, pickle.dumps([1, 2]), b"NPUROUT2" + b"\0" * 100, b"\x93NUMPY"], ids=str
)
def test_foreign_bytes_are_refused_by_their_first_bytes(foreign: bytes) -> None:
    with pytest.raises(RouteFileError, match="these bytes aren't routes") as caught:
        RoutedExperts.from_bytes(foreign)
    assert caught.value.got == foreign[:8]


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_anything_after_the_magic_is_refused_with_an_error_of_ours(rest: bytes) -> None:
    with pytest.raises(ReplayError):
        RoutedExperts.from_bytes(MAGIC + rest)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"3",
        b"{}",
        b"[" * 5000,
        b'{"tokens": -1, "layers": [0], "topk": 1, "dtype": "uint8"}',
        b'{"tokens": 1e400, "layers": [0], "topk": 1, "dtype": "uint8"}',
        b'{"tokens": 99999999999999999999999, "layers": [0], "topk": 99, "dtype": "uint8"}',
        b'{"tokens": 1, "layers": 3, "topk": 1, "dtype": "uint8"}',
        b'{"tokens": 1, "layers": [0], "topk": 1, "dtype": "float32"}',
        b'{"tokens": 1, "layers": [0], "topk": 1, "dtype": []}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(header: bytes) -> None:
    with pytest.raises(RouteFileError):
        RoutedExperts.from_bytes(MAGIC + struct.pack("<I", len(header)) + header + b"\0\0")


@pytest.mark.parametrize(
    "name", ["tokens", "layers", "topk", "num_experts", "dtype", "fingerprint", "weight_version"]
)
def test_a_header_that_lacks_something_is_refused_though_its_digest_is_right(name: str) -> None:
    said = header(routes())
    del said[name]
    ids, recorded = routes().ids.numpy().tobytes(), np.packbits(routes().recorded.numpy()).tobytes()
    said["digest"] = digest(said, ids, recorded)
    text = json.dumps(said, sort_keys=True).encode()
    with pytest.raises(RouteFileError, match="header of these routes can't be read"):
        RoutedExperts.from_bytes(MAGIC + struct.pack("<I", len(text)) + text + ids + recorded)


def test_text_is_refused() -> None:
    with pytest.raises(RouteFileError, match="these aren't bytes"):
        RoutedExperts.from_bytes("NPUROUT1")  # type: ignore[arg-type]


def test_a_header_is_json_that_others_can_read() -> None:
    data = routes().to_bytes()
    (length,) = struct.unpack_from("<I", data, 8)
    header = json.loads(data[12 : 12 + length])
    assert {name: header[name] for name in ("tokens", "layers", "topk", "num_experts", "dtype")} == {
        "tokens": 5,
        "layers": [1, 4],
        "topk": 2,
        "num_experts": 8,
        "dtype": "uint8",
    }


def test_what_is_read_is_checked_as_data_from_outside_t32() -> None:
    same = RoutedExperts(ids=torch.tensor([[[0, 1]]]).expand(64, 1, 2), layers=[3], num_experts=8)
    with pytest.raises(InvalidRoutes, match="layer 3: all 64 recorded rows are the same"):
        RoutedExperts.from_bytes(same.to_bytes())
