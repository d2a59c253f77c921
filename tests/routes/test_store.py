"""A folder of many samples' routes, and the wire: without copies, whole or not at all."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_replay import ReplayError, RoutedExperts, RouteStore, fingerprint
from npu_replay.errors import InvalidRoutes, RouteFileError
from npu_replay.routes import serialization
from npu_replay.routes import store as route_store
from writers import go_on, hanging_writer


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

    monkeypatch.setattr(route_store, "written", full)
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
    real = route_store.write_whole

    def full(path: Path, data: bytes, *, overwrite: bool) -> None:
        raise RouteFileError("the file can't be written (no space left)")

    monkeypatch.setattr(route_store, "write_whole", full)
    with pytest.raises(RouteFileError, match="no space left"):
        writer.flush()
    assert not list(tmp_path.iterdir())  # a shard without its index is nobody's
    monkeypatch.setattr(route_store, "write_whole", real)
    writer.flush()
    assert RouteStore(tmp_path)["k"] == sample(1)


def test_of_many_shards_few_headers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_store, "_HEADERS", 2)
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
    said = serialization.header(sample(1)) | change
    said = {name: value for name, value in said.items() if value is not None}
    ids, recorded = (array.numpy().tobytes() for array in (sample(1).ids, sample(1).recorded))
    said["digest"] = serialization.digest(said, ids, recorded)
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
    for mask, words in ((tensors["k.recorded"].bfloat16(), "BF16"), (tensors["k.recorded"].byte(), "uint8")):
        save_file(tensors | {"k.recorded": mask}, shard, {"format": route_store.FORMAT})
        with pytest.raises(RouteFileError, match=words):
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


# Files that change, writers that are killed, keys that mislead


def test_what_was_read_stays_when_the_shard_is_overwritten_and_a_shorter_one_is_an_error(
    tmp_path: Path,
) -> None:
    """A memory map shows the new bytes, and where there are none the process dies."""
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1, tokens=5000), key="k")
    (shard,) = tmp_path.glob("*.safetensors")
    store = RouteStore(tmp_path)
    read = store["k"]
    with shard.open("r+b") as file:
        file.write(b"\xff" * shard.stat().st_size)
    assert read == sample(1, tokens=5000)
    with pytest.raises(RouteFileError, match=r"changed after they were written|isn't a mask"):
        store["k"]
    os.truncate(shard, 10_000)
    with pytest.raises(RouteFileError, match="bytes early"):
        store["k"]


KILLED_WRITER = """
import sys
from npu_replay import RouteStore, RoutedExperts
from npu_replay.routes import store as route_store
import torch
whole = route_store.write_whole
def hang(path, data, *, overwrite):
    print("written", flush=True)
    sys.stdin.read(1)
    whole(path, data, overwrite=overwrite)
route_store.write_whole = hang
with RouteStore.writer(sys.argv[1]) as writer:
    writer.add(RoutedExperts(ids=torch.rand(5000, 2, 8).topk(2).indices, layers=(1, 4), num_experts=8), "k")
"""


def test_a_writer_that_was_killed_between_shard_and_index_does_not_block_its_name(tmp_path: Path) -> None:
    with hanging_writer(tmp_path, KILLED_WRITER) as process:
        assert [path.name for path in tmp_path.iterdir()] == ["routes-00000.safetensors"]
        with pytest.raises(RouteFileError, match="under this name"):
            RouteStore.writer(tmp_path)  # that one lives
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1), key="mine")
    assert list(RouteStore(tmp_path)) == ["mine"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_writer_that_was_looked_at_meanwhile_ends_well(tmp_path: Path) -> None:
    with hanging_writer(tmp_path, KILLED_WRITER) as process:
        with pytest.raises(RouteFileError, match="under this name"):
            RouteStore.writer(tmp_path)
        with RouteStore.writer(tmp_path, name="other") as writer:
            writer.add(sample(1), key="mine")
        go_on(process)
    assert [*RouteStore(tmp_path)] == ["mine", "k"]


def test_rests_of_a_killed_writers_later_shards_are_removed_and_nobody_elses(tmp_path: Path) -> None:
    rests = [
        ".routes-00003.safetensors.0.part",
        ".routes-00003.index.json.0.part",
        "routes-00003.safetensors",
    ]
    others = [
        ".routes-1-00003.safetensors.0.part",
        "routes-1-00003.safetensors",
        ".routes-x.part",
        "routes.txt",
    ]
    for name in rests + others:
        (tmp_path / name).write_bytes(b"half")
    RouteStore.writer(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("what", ["samples", "fingerprint"])
def test_a_key_that_stands_twice_in_an_index_is_refused(tmp_path: Path, what: str) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1), key="k")
    (index,) = tmp_path.glob("*.index.json")
    text = index.read_text()
    assert text.count(f'"{what}":') == 1
    index.write_text(text.replace(f'"{what}":', f'"{what}": 5, "{what}":'))
    with pytest.raises(RouteFileError, match=rf"{what}.*stands twice"):
        RouteStore(tmp_path)


def test_routes_of_other_tokens_under_the_key_of_these_are_refused(tmp_path: Path) -> None:
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1), key=route_store.key_of(fingerprint(tokens_of(2))))
        writer.add(sample(3, tokens=7).take(range(7)), key=route_store.key_of(fingerprint(tokens_of(4))))
    store = RouteStore(tmp_path)
    with pytest.raises(RouteFileError, match="routes belong to other tokens"):
        store.of(tokens_of(2))
    with pytest.raises(RouteFileError, match=r"another number of tokens.*20 .*got 7"):
        store.of(tokens_of(4))  # which say nothing of their tokens


@pytest.mark.parametrize("bad", [None, "routes", sample(1).ids], ids=type)
def test_only_routes_can_be_added(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(RouteFileError, match="no routes"):
        RouteStore.writer(tmp_path).add(bad, "k")


def test_what_can_not_be_written_to_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, name in (
        (tmp_path / "file", "routes"),
        (tmp_path, "x" * 300),
        (tmp_path / ("y" * 300), "routes"),
    ):
        with pytest.raises(RouteFileError), RouteStore.writer(folder, name=name) as writer:
            writer.add(sample(1))
    for bad in (None, "1", 2.5):
        with pytest.raises(ReplayError, match="shard_bytes"):
            RouteStore.writer(tmp_path, shard_bytes=bad)  # type: ignore[arg-type]


def test_any_byte_of_a_shard_or_an_index_that_is_flipped_or_cut_off_is_seen(tmp_path: Path) -> None:
    """A sample whose key was hit isn't there any more."""
    with RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1, tokens=8), key="k")
    for file in tmp_path.iterdir():
        good = file.read_bytes()
        for at in range(len(good)):
            flipped = good[:at] + bytes([good[at] ^ 0x04]) + good[at + 1 :]
            for bad in (flipped, good[:at]):
                file.write_bytes(bad)
                with pytest.raises((ReplayError, KeyError)):
                    RouteStore(tmp_path)["k"]
        file.write_bytes(good)
    assert RouteStore(tmp_path)["k"] == sample(1, tokens=8)


# Layers that are the same in all rows


def constant(tokens: int, experts: int = 64) -> RoutedExperts:
    """As an engine's array that was never looked at."""
    ids = sample(1, tokens + 1, experts).ids[:tokens].clone()
    ids[:, 1] = torch.arange(4)
    return RoutedExperts(ids=ids, layers=(1, 2, 5), num_experts=experts)


def test_a_constant_layer_in_a_folder_is_refused_but_where_the_tokens_explain_it(tmp_path: Path) -> None:
    same, others = [7] * 100, list(range(100))
    with RouteStore.writer(tmp_path) as writer:
        for tokens in (same, others):
            writer.add(constant(100), route_store.key_of(fingerprint(tokens)))
    store = RouteStore(tmp_path)
    assert store.of(same) == constant(100)
    for read in (lambda: store.of(others), lambda: store[route_store.key_of(fingerprint(same))]):
        with pytest.raises(InvalidRoutes, match="layer 2: all 100 recorded rows are the same") as caught:
            read()
        assert "routes-00000.safetensors" in caught.value.where


def test_what_was_vouched_for_and_what_was_not_lie_in_one_shard(tmp_path: Path) -> None:
    vouched = RoutedExperts.unrecorded(9, layers=(1, 2, 5), topk=4, num_experts=64)
    with RouteStore.writer(tmp_path) as writer:
        writer.add(vouched, "vouched")
        writer.add(sample(1), "not")
    store = RouteStore(tmp_path)
    assert (store["vouched"], store["not"]) == (vouched, sample(1))
    assert (store["vouched"].vouched, store["not"].vouched) == (True, False)
