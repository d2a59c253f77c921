"""A folder of many samples' routes, and the wire: without copies, whole or not at all."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_replay import (
    ReplayError,
    RoutedExperts,
    RouteStore,
    fingerprint,
    route_bytes,
    route_file,
    route_store,
)
from npu_replay.errors import RouteFileError


def sample(number: int, tokens: int = 20, experts: int = 64) -> RoutedExperts:
    generator = np.random.default_rng(number)
    ids = np.argsort(generator.random((tokens, 3, experts)), axis=2)[..., :4]
    recorded = np.arange(tokens) < tokens - 1
    return RoutedExperts(
        ids=ids,
        layers=(1, 2, 5),
        num_experts=experts,
        recorded=recorded,
        fingerprint=fingerprint(tokens_of(number, tokens)),
        weight_version=f"step {number}",
    )


def tokens_of(number: int, tokens: int = 20) -> list[int]:
    return [number, *range(tokens - 1)]


def test_thousands_of_samples_come_back(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path, shard_bytes=50_000) as writer:
        for number in range(1000):
            writer.add(sample(number))
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    store = RouteStore(tmp_path)
    assert len(store) == 1000
    for number in (0, 208, 209, 999):
        assert store.of(tokens_of(number)) == sample(number)
        assert store.of(tokens_of(number)).weight_version == f"step {number}"


def test_repr_says_how_many_samples_there_are(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(0))
        assert repr(writer) == f"RouteWriter({str(tmp_path)!r}, 'routes', 1 samples)"
    assert repr(RouteStore(tmp_path)) == f"RouteStore({str(tmp_path)!r}, 1 samples)"


def test_int16_ids_and_own_keys(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1, experts=300), key="a/b.c")
    store = RouteStore(tmp_path)
    assert list(store) == ["a/b.c"]
    assert store["a/b.c"] == sample(1, experts=300)
    with pytest.raises(KeyError):
        store["b"]


def _write(folder: str, rank: int) -> None:
    with RouteStore.writer(folder, name=f"rank-{rank}") as writer:
        for number in range(rank * 10, rank * 10 + 10):
            writer.add(sample(number))


def test_each_rank_writes_its_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_write, args=(str(tmp_path), rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    store = RouteStore(tmp_path)
    assert [store.of(tokens_of(number)) == sample(number) for number in range(20)] == [True] * 20


def test_tokens_that_nobody_wrote_are_an_error(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1))
    with pytest.raises(RouteFileError, match=r"no routes of these tokens.*tokenised again"):
        RouteStore(tmp_path).of([1, 2, 3])


def test_a_job_that_dies_leaves_whole_shards(tmp_path: Path) -> None:
    writer = RouteStore.writer(tmp_path, shard_bytes=1)
    writer.add(sample(1))
    writer.shard_bytes = 1 << 20
    writer.add(sample(2))
    del writer
    assert list(RouteStore(tmp_path)) == [f"{fingerprint(tokens_of(1)):016x}"]


def test_what_an_error_interrupts_is_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1))
        raise KeyboardInterrupt
    assert len(RouteStore(tmp_path)) == 1


@pytest.mark.parametrize(
    "share",
    [
        lambda whole: (whole, whole),
        lambda whole: (whole.only([1]), whole.only([5])),
        lambda whole: (whole.sequence(0, 5), whole.sequence(2, 8)),
    ],
    ids=["one twice", "layers", "rows"],
)
def test_samples_that_share_memory_are_written(tmp_path: Path, share: Any) -> None:
    one, other = share(sample(1))
    with RouteStore.writer(tmp_path) as writer:
        writer.add(one, "one")
        writer.add(other, "other")
    store = RouteStore(tmp_path)
    assert (store["one"], store["other"]) == (one, other)


def test_an_error_of_writing_does_not_hide_the_callers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes, *, overwrite: bool) -> None:
        raise RouteFileError("the file can't be written (no space left)")

    monkeypatch.setattr(route_file, "write_whole", full)
    with pytest.raises(ZeroDivisionError), RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1))
        raise ZeroDivisionError
    assert "waiting are lost" in caplog.text
    assert "no space left" in caplog.text
    with pytest.raises(RouteFileError, match="no space left"), RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1))


def test_a_key_twice_and_a_name_twice_are_errors(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1))
        with pytest.raises(RouteFileError, match=r"key is taken.*same tokens: pass a key of your own"):
            writer.add(sample(1))
        writer.add(sample(1), key="the second")
    assert RouteStore(tmp_path)["the second"] == RouteStore(tmp_path).of(tokens_of(1))
    with pytest.raises(RouteFileError, match="under this name"):
        RouteStore.writer(tmp_path)
    for name in ("../routes", "", "a\0b", "a\nb", "a/b"):
        with pytest.raises(RouteFileError, match="bad name"):
            RouteStore.writer(tmp_path, name=name)
    with pytest.raises(RouteFileError, match="neither a key nor a fingerprint"):
        RouteStore.writer(tmp_path, name="other").add(sample(1).take([0, 1]))


def test_of_two_writers_of_one_key_the_first_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks that sampled the same short answer; one of them must not make the folder unreadable."""
    for name, number in (("a", 1), ("b", 1)):
        with RouteStore.writer(tmp_path, name=name) as writer:
            writer.add(sample(number), key="k")
    assert RouteStore(tmp_path)["k"] == sample(1)
    assert not caplog.records
    with RouteStore.writer(tmp_path, name="c") as writer:
        writer.add(sample(2), key="k")
    assert RouteStore(tmp_path)["k"] == sample(1)
    assert "1 samples were written twice with other routes" in caplog.text


@pytest.mark.parametrize("key", ["", "\ud800", ("a",), 7], ids=repr)
def test_a_bad_key_stops_none_of_the_others(tmp_path: Path, key: Any) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1), key="good")
        with pytest.raises(RouteFileError, match="bad key"):
            writer.add(sample(2), key=key)
    assert list(RouteStore(tmp_path)) == ["good"]


def test_a_writer_goes_on_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RouteStore.writer(tmp_path)
    writer.add(sample(1), key="k")
    real, calls = route_file.write_whole, []

    def full(path: Path, data: bytes, *, overwrite: bool) -> None:
        calls.append(path.name)
        if len(calls) == 2:
            raise RouteFileError("the file can't be written (no space left)")
        real(path, data, overwrite=overwrite)

    monkeypatch.setattr(route_file, "write_whole", full)
    with pytest.raises(RouteFileError, match="no space left"):
        writer.flush()
    writer.flush()
    assert RouteStore(tmp_path)["k"] == sample(1)


def test_shards_are_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_store, "_OPEN", 2)
    with RouteStore.writer(tmp_path, shard_bytes=1) as writer:
        for number in range(6):
            writer.add(sample(number))
    store = RouteStore(tmp_path)
    assert [store.of(tokens_of(number)) == sample(number) for number in (0, 5, 1, 0, 4)] == [True] * 5
    assert len(store._files) == 2


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))], ids=["copy", "pickle"]
)
def test_a_store_that_was_read_from_can_be_copied(tmp_path: Path, copied: Any) -> None:
    """To a loader's worker processes, say."""
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1))
    store = RouteStore(tmp_path)
    assert store.of(tokens_of(1)) == sample(1)
    assert copied(store).of(tokens_of(1)) == sample(1)
    assert store.of(tokens_of(1)) == sample(1)


@pytest.mark.parametrize(
    "index", ["", "[]", "[" * 100_000, '{"format": "x"}', '{"format": "npu_replay.store.1"}']
)
def test_a_foreign_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "routes.index.json").write_text(index)
    with pytest.raises(RouteFileError, match="can't be read"):
        RouteStore(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"num_experts": None}, {"fingerprint": None}, {"weight_version": None}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_an_index_that_lacks_something_is_refused_though_its_digest_is_right(
    tmp_path: Path, change: dict[str, str | None]
) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1), key="k")
    (index,) = tmp_path.glob("*.index.json")
    written = json.loads(index.read_text())
    said = route_bytes.header(sample(1)) | change
    said = {name: value for name, value in said.items() if value is not None}
    ids, recorded = (array.numpy().tobytes() for array in (sample(1).ids, sample(1).recorded))
    said["digest"] = route_bytes.digest(said, ids, recorded)
    index.write_text(json.dumps(written | {"common": {}, "samples": {"k": said}}))
    with pytest.raises(RouteFileError, match=rf"index of routes can't be read.*{next(iter(change))}"):
        RouteStore(tmp_path)["k"]


def test_an_index_leads_to_no_other_folder(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path / "store") as writer:
        writer.add(sample(1), key="k")
    (index,) = (tmp_path / "store").glob("*.index.json")
    changed = json.loads(index.read_text())
    changed["shard"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(changed))
    with pytest.raises(RouteFileError, match="can't be read"):
        RouteStore(tmp_path / "store")


def test_damage_is_seen(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1), key="k")
    (shard,) = tmp_path.glob("*.safetensors")
    good = shard.read_bytes()
    shard.write_bytes(good[:-30] + bytes([good[-30] ^ 1]) + good[-29:])
    with pytest.raises(ReplayError, match=r"changed after they were written|expert twice"):
        RouteStore(tmp_path)["k"]
    shard.write_bytes(good[:-30])
    with pytest.raises(RouteFileError, match="can't be read"):
        RouteStore(tmp_path)["k"]
    shard.unlink()
    with pytest.raises(RouteFileError, match="can't be read"):
        RouteStore(tmp_path)["k"]


def test_a_mask_of_another_dtype_is_damage_too(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1), key="k")
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    save_file(tensors | {"k.recorded": tensors["k.recorded"].bfloat16()}, shard)
    with pytest.raises(RouteFileError, match="changed after they were written"):
        RouteStore(tmp_path)["k"]


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RouteFileError, match="no routes in this folder"):
        RouteStore(tmp_path)


# The wire


def test_buffers_share_the_ids() -> None:
    routes = sample(1, tokens=500)
    header, ids, recorded = routes.to_buffers()
    assert np.frombuffer(ids, np.uint8).ctypes.data == routes.ids.data_ptr()
    assert RoutedExperts.from_bytes(header + ids + recorded) == routes
    assert routes.to_bytes() == header + ids + recorded


def test_reading_bytes_copies_no_ids() -> None:
    data = sample(1, tokens=500).to_bytes()
    routes = RoutedExperts.from_bytes(data)
    start = np.frombuffer(data, np.uint8).ctypes.data
    assert start < routes.ids.data_ptr() < start + len(data)


def test_pickles_carry_the_ids_out_of_band() -> None:
    routes = sample(1, tokens=5000)
    buffers: list[pickle.PickleBuffer] = []
    small = pickle.dumps(routes, protocol=5, buffer_callback=buffers.append)
    assert len(small) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == routes.ids.nbytes + len(routes)
    again = pickle.loads(small, buffers=buffers)
    assert again == routes
    assert again.ids.data_ptr() == routes.ids.data_ptr()
    assert pickle.loads(pickle.dumps(routes, protocol=4)) == routes


def test_a_pickled_slice_is_no_larger_than_it_is() -> None:
    part = sample(1, tokens=50_000).sequence(10, 20)
    tracemalloc.start()
    data = pickle.dumps(part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) < 2000
    assert peak < 100_000
    assert torch.equal(pickle.loads(data).ids, part.ids)
