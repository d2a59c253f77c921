"""Bytes, files and folders: what comes back is what went in, or a ReplayError. And what is bytes' own."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from npu_replay import ReplayError, RoutedExperts, RouteStore
from npu_replay.errors import InvalidRoutes, RouteFileError
from npu_replay.routes import serialization
from npu_replay.routes.serialization import FORMAT, MAGIC, digest, header


def routes(tokens: int = 5, experts: int = 8, **changes: Any) -> RoutedExperts:
    scores = torch.rand(tokens, 2, experts, generator=torch.Generator().manual_seed(tokens))
    recorded = torch.arange(tokens) != 1
    arguments: dict[str, Any] = {"recorded": recorded, "fingerprint": 2**64 - 1, "weight_version": "v1"}
    arguments |= changes
    return RoutedExperts(ids=scores.topk(2).indices, layers=(1, 4), num_experts=experts, **arguments)


class Form(NamedTuple):
    """A form that routes have outside a process.

    Attributes:
        write, read: at a path.
        forge: writes a header, which may be wrong, with a right digest: of these ids and this mask.
        flips: what every byte is changed by; in a file white space may be another.
    """

    write: Callable[[RoutedExperts, Path], object]
    read: Callable[[Path], RoutedExperts]
    forge: Callable[[Path, dict[str, Any], torch.Tensor, torch.Tensor], object]
    flips: tuple[int, ...]


def store(found: RoutedExperts, folder: Path) -> None:
    with RouteStore.writer(folder) as writer:
        writer.add(found, "k")


def signed(said: dict[str, Any], ids: torch.Tensor, recorded: bytes) -> dict[str, Any]:
    return said | {"digest": digest(said, ids.view(torch.uint8).numpy().tobytes(), recorded)}


def bytes_of(mask: torch.Tensor) -> bytes:
    return mask.view(torch.uint8).numpy().tobytes()


def forge_bytes(path: Path, said: dict[str, Any], ids: torch.Tensor, recorded: torch.Tensor) -> None:
    bits = np.packbits(recorded.numpy()).tobytes()
    text = json.dumps(signed(said, ids, bits), sort_keys=True).encode()
    path.write_bytes(MAGIC + struct.pack("<I", len(text)) + text + ids.numpy().tobytes() + bits)


def forge_file(path: Path, said: dict[str, Any], ids: torch.Tensor, recorded: torch.Tensor) -> None:
    text = json.dumps(signed(said, ids, bytes_of(recorded)))
    save_file({"ids": ids, "recorded": recorded}, path, {"format": FORMAT, "routes": text})


def forge_store(path: Path, said: dict[str, Any], ids: torch.Tensor, recorded: torch.Tensor) -> None:
    store(routes(), path)
    (index,) = path.glob("*.index.json")
    samples = {"k": signed(said, ids, bytes_of(recorded))}
    index.write_text(json.dumps(json.loads(index.read_text()) | {"common": {}, "samples": samples}))


FORMS = {
    "bytes": Form(
        lambda found, path: path.write_bytes(found.to_bytes()),
        lambda path: RoutedExperts.from_bytes(path.read_bytes()),
        forge_bytes,
        (0x01, 0x20, 0x29, 0x80, 0xFF),  # 0x29 makes a tab of a space
    ),
    "file": Form(RoutedExperts.save, RoutedExperts.load, forge_file, (0x01, 0x04, 0x80, 0xFF)),
    "folder": Form(store, lambda path: RouteStore(path)["k"], forge_store, (0x04,)),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


# In all forms


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("version", [None, 3, "v1"])
def test_what_comes_back_is_what_went_in(
    form: Form, tmp_path: Path, tokens: int, experts: int, version: Any
) -> None:
    before = routes(tokens, experts, weight_version=version)
    form.write(before, tmp_path / "routes")
    after = form.read(tmp_path / "routes")
    assert after == before
    assert after.ids.dtype == before.ids.dtype


def test_what_is_cut_short_or_changed_in_any_byte_is_refused(form: Form, tmp_path: Path) -> None:
    """A sample of a folder whose key was hit isn't there any more."""
    place = tmp_path / "routes"
    form.write(routes(tokens=8), place)
    for file in list(place.iterdir()) if place.is_dir() else [place]:
        good = file.read_bytes()
        for at in range(len(good)):
            flipped = [good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :] for flip in form.flips]
            for bad in (good[:at], *flipped):
                file.write_bytes(bad)
                with pytest.raises((ReplayError, KeyError)):
                    form.read(place)
        file.write_bytes(good)
    assert form.read(place) == routes(tokens=8)


@pytest.mark.parametrize(
    "name", ["tokens", "layers", "topk", "num_experts", "dtype", "fingerprint", "weight_version"]
)
def test_a_header_that_lacks_something_is_refused_though_its_digest_is_right(
    form: Form, tmp_path: Path, name: str
) -> None:
    said = header(routes())
    del said[name]
    form.forge(tmp_path / "routes", said, routes().ids, routes().recorded)
    with pytest.raises(RouteFileError, match=rf"can't be read.*no {name}"):
        form.read(tmp_path / "routes")


@pytest.mark.parametrize(("ids", "recorded"), [(torch.bfloat16, torch.bool), (torch.uint8, torch.bfloat16)])
def test_tensors_that_numpy_has_not_are_refused(
    tmp_path: Path, ids: torch.dtype, recorded: torch.dtype
) -> None:
    said = header(routes()) | {"dtype": str(ids).removeprefix("torch.")}
    FORMS["file"].forge(tmp_path / "routes", said, routes().ids.to(ids), routes().recorded.to(recorded))
    with pytest.raises(RouteFileError, match=r"can't be read as routes.*(bfloat16|BF16)"):
        RoutedExperts.load(tmp_path / "routes")


def test_a_file_that_is_replaced_between_its_header_and_its_ids_is_read_as_the_one_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load beside `save(overwrite=True)` gives one of the two: it opens the path once."""
    path = tmp_path / "routes"
    one, other = routes(40), routes(30)
    one.save(path)
    whole = serialization.check_header

    def meanwhile(said: Any, *more: Any) -> None:
        whole(said, *more)
        other.save(path, overwrite=True)

    monkeypatch.setattr(serialization, "check_header", meanwhile)
    assert RoutedExperts.load(path) == one
    assert RoutedExperts.load(path) == other


def test_a_mask_of_other_bytes_than_0_and_1_is_refused_though_its_digest_is_right(tmp_path: Path) -> None:
    odd = torch.tensor([0, 1, 2, 3, 255], dtype=torch.uint8)
    FORMS["file"].forge(tmp_path / "routes", header(routes()), routes().ids, odd.view(torch.bool))
    with pytest.raises(RouteFileError, match="isn't a mask"):
        RoutedExperts.load(tmp_path / "routes")


def test_what_is_read_is_checked_as_data_from_outside_t32(form: Form, tmp_path: Path) -> None:
    same = RoutedExperts(ids=torch.tensor([[[0, 1]]]).expand(64, 1, 2), layers=[3], num_experts=8)
    form.write(same, tmp_path / "routes")
    with pytest.raises(InvalidRoutes, match="layer 3: all 64 recorded rows are the same"):
        form.read(tmp_path / "routes")


# Bytes


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
def test_any_routes_come_back_from_bytes(before: RoutedExperts) -> None:
    after = RoutedExperts.from_bytes(before.to_bytes())
    assert after == before
    assert after.ids.dtype == before.ids.dtype
    assert after.to_bytes() == before.to_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
@pytest.mark.parametrize("experts", [8, 256])
def test_any_bytes_are_read_and_the_ids_are_not_copied(kind: Any, experts: int) -> None:
    data = kind(routes(experts=experts).to_bytes())
    read = RoutedExperts.from_bytes(data)
    assert read == routes(experts=experts)
    start = np.frombuffer(data, np.uint8).ctypes.data
    assert start < read.ids.data_ptr() < start + len(data)


def test_two_byte_ids_are_not_copied_either() -> None:
    data = routes(experts=300, recorded=None).to_bytes()
    padded = bytearray(len(data) + 1)
    for offset in (0, 1):  # int16 at an odd address too
        padded[offset : offset + len(data)] = data
        read = RoutedExperts.from_bytes(memoryview(padded)[offset : offset + len(data)])
        assert read == routes(experts=300, recorded=None)
        start = np.frombuffer(padded, np.uint8).ctypes.data
        assert start <= read.ids.data_ptr() < start + len(padded)


def test_buffers_share_the_ids() -> None:
    given = routes(tokens=500)
    about, ids, recorded = given.to_buffers()
    assert np.frombuffer(ids, np.uint8).ctypes.data == given.ids.data_ptr()
    assert given.to_bytes() == about + ids + recorded


def test_the_size_is_the_ids_and_one_bit_a_token() -> None:
    """What a header costs is paid once, not for every token."""
    small, large = (len(routes(tokens=tokens).to_bytes()) for tokens in (1000, 9000))
    assert large - small == 8000 * 2 * 2 + 8000 // 8


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


def test_text_and_bytes_with_more_after_them_are_refused() -> None:
    with pytest.raises(RouteFileError, match="these aren't bytes"):
        RoutedExperts.from_bytes("NPUROUT1")  # type: ignore[arg-type]
    with pytest.raises(RouteFileError, match="incomplete"):
        RoutedExperts.from_bytes(routes().to_bytes() + b"\0")


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


def test_a_header_is_json_that_others_can_read() -> None:
    data = routes().to_bytes()
    (length,) = struct.unpack_from("<I", data, 8)
    said = json.loads(data[12 : 12 + length])
    wanted = {"tokens": 5, "layers": [1, 4], "topk": 2, "num_experts": 8, "dtype": "uint8"}
    assert wanted.items() <= said.items()


# Pickles


def test_pickles_carry_the_ids_out_of_band() -> None:
    given = routes(tokens=5000)
    buffers: list[pickle.PickleBuffer] = []
    small = pickle.dumps(given, protocol=5, buffer_callback=buffers.append)
    assert len(small) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == given.ids.nbytes + len(given)
    again = pickle.loads(small, buffers=buffers)
    assert again == given
    assert again.ids.data_ptr() == given.ids.data_ptr()
    assert pickle.loads(pickle.dumps(given, protocol=4)) == given


def test_a_pickled_slice_is_no_larger_than_it_is() -> None:
    part = routes(tokens=50_000).sequence(10, 20)
    tracemalloc.start()
    data = pickle.dumps(part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) < 2000
    assert peak < 100_000
    assert torch.equal(pickle.loads(data).ids, part.ids)
