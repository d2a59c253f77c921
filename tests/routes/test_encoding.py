"""Bytes, files and folders: what comes back is what went in, or a ReplayError. And what is bytes' own."""

from __future__ import annotations

import hashlib
import pickle
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as package

from choice import WHOLE, examples
from npu_replay import ReplayError, RoutedExperts, RouteStore
from npu_replay.errors import RouteFileError
from npu_replay.routes import encoding


def routes(tokens: int = 5, experts: int = 8) -> RoutedExperts:
    return RoutedExperts(
        ids=torch.rand(tokens, 2, experts, generator=torch.Generator().manual_seed(tokens)).topk(2).indices,
        layers=(1, 4),
        num_experts=experts,
        recorded=torch.arange(tokens) != 1,
        fingerprint=2**64 - 1,
        weight_version="v1",
    )


class Form(NamedTuple):
    """A form that routes have outside a process.

    Attributes:
        write, read: at a path.
        put: puts an encoding there.
    """

    write: Callable[[RoutedExperts, Path], object]
    read: Callable[[Path], RoutedExperts]
    put: Callable[[Path, bytes], object]

    def round_trip(self, routes: RoutedExperts) -> RoutedExperts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "routes"
            self.write(routes, path)
            return self.read(path)


def store(sample: RoutedExperts, folder: Path) -> None:
    with RouteStore.writer(folder) as writer:
        writer.add(sample, "k")


def put_shard(folder: Path, data: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "routes-00000.safetensors").write_bytes(data)


FORMS = {
    "bytes": Form(
        lambda sample, path: path.write_bytes(sample.to_bytes()),
        lambda path: RoutedExperts.from_bytes(path.read_bytes()),
        Path.write_bytes,
    ),
    "file": Form(RoutedExperts.save, RoutedExperts.load, Path.write_bytes),
    "folder": Form(store, lambda path: RouteStore(path)["k"], put_shard),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


# In all forms


def test_what_is_cut_short_or_of_which_any_bit_is_flipped_is_refused(form: Form, tmp_path: Path) -> None:
    """Of each byte one bit, in ci/all.sh all of them; and 0x29, which makes a tab of a space. Of a file every
    fifth byte: it is read by the same decoder."""
    place = tmp_path / "routes"
    form.write(routes(tokens=8), place)
    [file] = place.iterdir() if place.is_dir() else [place]
    good = file.read_bytes()
    for at in range(0, len(good), 1 if WHOLE or form is FORMS["bytes"] else 5):
        bits = range(8) if WHOLE else [at % 8]
        flipped = [bytes([good[at] ^ flip]) for flip in (*(1 << bit for bit in bits), 0x29)]
        for bad in (good[:at], *(good[:at] + byte + good[at + 1 :] for byte in flipped)):
            form.put(place, bad)
            with pytest.raises((ReplayError, KeyError)):  # of a store that has the sample by another key
                form.read(place)
    form.put(place, good)
    assert form.read(place) == routes(tokens=8)


def test_the_layout_is_pinned() -> None:
    """A file that an earlier release wrote is read: another layout needs another name in FORMAT."""
    assert hashlib.blake2b(routes().to_bytes(), digest_size=8).hexdigest() == "f226e2922348234c"


@pytest.mark.parametrize("length", [1 << 63, 1 << 40, 100_000_001])
def test_a_forged_length_allocates_nothing(form: Form, tmp_path: Path, length: int) -> None:
    form.put(tmp_path / "routes", struct.pack("<Q", length) + routes().to_bytes()[8:])
    with pytest.raises(RouteFileError, match="header is cut short"):
        form.read(tmp_path / "routes")


@pytest.mark.parametrize(("tokens", "experts"), [(0, 8), (5, 300)])
def test_the_safetensors_package_opens_all_that_is_written(tmp_path: Path, tokens: int, experts: int) -> None:
    first = routes(tokens, experts)
    second = routes(tokens + 1, experts)
    first.save(tmp_path / "routes")
    with RouteStore.writer(tmp_path / "folder") as writer:
        writer.add(first, "é/a.b")
        writer.add(second, "\U0001f600")
    [shard] = (tmp_path / "folder").iterdir()
    for arrays, samples in (
        (package.load(first.to_bytes()), [first]),
        (package.load_file(tmp_path / "routes"), [first]),
        (package.load_file(shard), [first, second]),
    ):
        assert arrays.keys() == {"ids", "recorded"}
        for name, array in arrays.items():
            np.testing.assert_array_equal(
                array, np.concatenate([getattr(sample, name) for sample in samples])
            )
    store = RouteStore(tmp_path / "folder")
    assert (store["é/a.b"], store["\U0001f600"]) == (first, second)


def test_a_file_that_is_replaced_between_its_header_and_its_ids_is_read_as_the_one_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load beside `save(overwrite=True)` gives one of the two: it opens the path once."""
    path = tmp_path / "routes"
    first = routes(40)
    other = routes(30)
    first.save(path)
    whole = encoding.Header.arguments

    def meanwhile(header: Any, *arguments: Any) -> Any:
        other.save(path, overwrite=True)
        return whole(header, *arguments)

    monkeypatch.setattr(encoding.Header, "arguments", meanwhile)
    assert RoutedExperts.load(path) == first
    assert RoutedExperts.load(path) == other


# Bytes


@st.composite
def any_routes(draw: st.DrawFn) -> RoutedExperts:
    tokens = draw(st.integers(0, 20))
    layers = draw(st.integers(1, 4))
    experts = draw(st.sampled_from([1, 2, 8, 255, 256, 257, 32_767]))
    topk = draw(st.integers(1, min(experts, 4)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return RoutedExperts(
        ids=(random.integers(experts, size=(tokens, layers, 1)) + np.arange(topk)) % experts,
        layers=sorted(draw(st.sets(st.integers(0, 200), min_size=layers, max_size=layers))),
        num_experts=experts,
        recorded=random.random(tokens) < draw(st.sampled_from([0.0, 0.5, 1.0])),
        fingerprint=draw(st.none() | st.integers(0, 2**64 - 1)),
        weight_version=draw(
            st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | st.just("v1\ud800")
        ),
    )


@given(any_routes())
@examples(100)
def test_any_routes_come_back_in_every_form(before: RoutedExperts) -> None:
    for form in FORMS.values():
        after = form.round_trip(before)
        assert after == before
        assert after.ids.dtype == before.ids.dtype
        assert after.to_bytes() == before.to_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
@pytest.mark.parametrize("experts", [256, 300])
def test_any_bytes_are_read_and_the_ids_are_not_copied(kind: Any, experts: int) -> None:
    for offset in (0, 1):  # int16 at an odd address too
        data = kind(bytes(offset) + routes(experts=experts).to_bytes())
        read = RoutedExperts.from_bytes(memoryview(data)[offset:])
        assert read == routes(experts=experts)
        start = np.frombuffer(data, np.uint8).ctypes.data
        assert start < read.ids.data_ptr() < start + len(data)


FOREIGN = r"these bytes can't be read as routes|doesn't hold routes"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        *((data, FOREIGN) for data in (b"", b"\0" * 1000, pickle.dumps([1, 2]), b"NPUROUT1" + b"\0" * 100)),
        *((data, FOREIGN) for data in (b"\x93NUMPY", package.save({}), struct.pack("<Q", 2) + b"[]")),
        (routes().to_bytes() + b"\0", "bytes long, and its header says"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_are_no_bytes_of_routes_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(RouteFileError, match=words):
        RoutedExperts.from_bytes(data)


# Pickles


def test_pickles_carry_the_ids_out_of_band() -> None:
    original = routes(tokens=5000)
    buffers: list[pickle.PickleBuffer] = []
    small = pickle.dumps(original, protocol=5, buffer_callback=buffers.append)
    assert len(small) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == original.ids.nbytes + len(original)
    again = pickle.loads(small, buffers=buffers)
    assert again == original
    assert again.ids.data_ptr() == original.ids.data_ptr()
    assert pickle.loads(pickle.dumps(original, protocol=4)) == original


def test_a_pickled_slice_is_no_larger_than_it_is() -> None:
    part = routes(tokens=50_000).sequence(10, 20)
    tracemalloc.start()
    data = pickle.dumps(part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) < 2000
    assert peak < 100_000
    assert torch.equal(pickle.loads(data).ids, part.ids)
