"""put and fetch: by the process itself, a folder, and (where it is installed) Ray's object store.

What arrives is held against what was put, whatever happened to the references on the way.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_replay
from memory import own_memory
from npu_replay import (
    InvalidRoutes,
    ParallelLayout,
    ReplayError,
    RoutedExperts,
    RouteFileError,
    TokenLayout,
    delivery,
)
from npu_replay.delivery import carriers, folder, references
from npu_replay.delivery.references import seal
from npu_replay.routes import checks

EXPERTS, TOPK = 16, 3
LAYERS = tuple(range(1, 13))  # layer 0 is dense


def routes(seed: int, tokens: int = 40, layers: tuple[int, ...] = LAYERS) -> RoutedExperts:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, len(layers), EXPERTS, generator=generator).topk(TOPK).indices
    return RoutedExperts(
        ids=ids,
        layers=layers,
        num_experts=EXPERTS,
        recorded=torch.rand(tokens, generator=generator) > 0.1,
        fingerprint=npu_replay.fingerprint(torch.arange(seed, seed + tokens)),
    )


Make = Callable[..., delivery.Carrier]


@pytest.fixture(params=["process", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "process":
        return delivery.ProcessCarrier
    pytest.importorskip("safetensors")
    return lambda **options: delivery.FolderCarrier(tmp_path / "routes", **options)


@pytest.mark.parametrize("cut", [1, 5, 100, [(1, 2), (3, 4, 5, 6, 7, 8, 9), (10, 11, 12, 13)]])
@pytest.mark.parametrize("layers", [None, (1,), (4, 5, 6), (2, 7, 12)])
def test_what_arrives_is_what_was_put(make: Make, cut: Any, layers: tuple[int, ...] | None) -> None:
    samples = [routes(seed, tokens) for seed, tokens in enumerate((40, 1, 7))]
    references = make(cut=cut).put_all(samples)
    for sent, got in zip(samples, delivery.fetch(references, layers=layers), strict=True):
        assert got == (sent if layers is None else sent.only(layers))


def test_references_are_small_and_survive_what_a_batch_goes_through(make: Make) -> None:
    """Pickled in an object array, reordered, split, joined, repeated."""
    samples = [routes(seed, 200) for seed in range(8)]
    references = make().put_all(samples)
    column = np.array(references, dtype=object)
    assert len(pickle.dumps(column)) < 8 * 400 < 8 * 200 * len(LAYERS)
    order = np.random.default_rng(0).permutation(8)
    moved = np.concatenate([pickle.loads(pickle.dumps(part)) for part in np.split(column[order], 4)])
    moved = copy.deepcopy(moved).repeat(2)
    got = delivery.fetch(moved, layers=(3, 4))
    for number, one in enumerate(got):
        assert one == samples[order[number // 2]].only((3, 4))
    assert got[0] is got[1]  # read once


def test_a_stage_of_a_pipeline_reads_its_own_piece(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = npu_replay.DecoderLayers(13, moe_layer_freq=[0] + [1] * 12, table=[[4], [5], [4]])
    whole = ParallelLayout(pp=3, decoder=decoder)
    sample = routes(0)
    [reference] = make(cut=whole).put_all([sample])
    assert len(reference.blocks) == 3
    assert sorted(layer for block in reference.blocks for layer in block) == list(LAYERS)
    asked: list[int] = []
    read, counted = reference.read, copy.copy(reference)
    object.__setattr__(
        counted, "read", lambda handles, patience: asked.append(len(handles)) or read(handles, patience)
    )
    for rank in range(3):
        here = ParallelLayout(pp=3, pp_rank=rank, decoder=decoder)
        assert delivery.fetch([counted], here) == [sample.only(here.moe_layers)]
    assert asked == [1, 1, 1]


def test_virtual_stages_of_a_rank_are_one_piece(make: Make) -> None:
    whole = ParallelLayout(pp=2, vp=3, decoder=npu_replay.DecoderLayers(12))
    sample = routes(0, layers=tuple(range(12)))
    [reference] = make(cut=whole).put_all([sample])
    assert reference.blocks == ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11))
    assert delivery.fetch([reference]) == [sample]
    assert delivery.fetch([reference], replace(whole, pp_rank=1)) == [sample.only(reference.blocks[1])]


def test_what_is_fetched_is_gathered_as_ever(make: Make) -> None:
    samples = [routes(seed, tokens) for seed, tokens in enumerate((12, 9, 20))]
    fetched = delivery.fetch(make(cut=5).put_all(samples), layers=(4, 5, 6))
    for rank in range(4):
        parallel = ParallelLayout(tp=2, tp_rank=rank % 2, cp=2, cp_rank=rank // 2, sequence_parallel=True)
        layout = TokenLayout.packed([12, 9, 20], parallel=parallel)
        assert layout.gather(fetched, layers=(5, 6)) == layout.gather(samples, layers=(5, 6))


def test_the_process_frees_with_the_last_reference() -> None:
    carrier = delivery.ProcessCarrier()
    reference = carrier.put(routes(0))
    data = pickle.dumps(reference)
    assert delivery.fetch([pickle.loads(data)]) == [routes(0)]
    del reference
    gc.collect()
    with pytest.raises(InvalidRoutes, match=r"sample 0, Reference.*freed"):
        delivery.fetch([pickle.loads(data)])


def test_references_of_another_job_are_refused_in_words(tmp_path: Path) -> None:
    """Of its process, and of its folder, which was cleaned up."""
    pytest.importorskip("safetensors")
    file, away = tmp_path / "references", tmp_path / "away"
    script = """if True:
        import pickle, sys, torch
        from npu_replay import RoutedExperts, delivery
        routes = RoutedExperts(ids=torch.arange(3).expand(5, 2, 3), layers=[0, 1], num_experts=4)
        found = [one.put(routes) for one in (delivery.ProcessCarrier(), delivery.FolderCarrier(sys.argv[2]))]
        open(sys.argv[1], "wb").write(pickle.dumps(found))
    """
    subprocess.run([sys.executable, "-c", script, str(file), str(away)], check=True, timeout=90)
    of_a_process, of_a_folder = pickle.loads(file.read_bytes())
    assert len(delivery.fetch([of_a_folder])) == 1
    shutil.rmtree(away)
    for reference, said in (
        (of_a_process, r"put in process \d+, read in \d+"),
        (of_a_folder, "No such file"),
    ):
        with pytest.raises(InvalidRoutes, match=f"sample 0, .*can't be read.*{said}"):
            delivery.fetch([reference], patience=0.1)


def test_a_step_that_failed_is_freed_without_the_collector() -> None:
    carrier = delivery.ProcessCarrier()
    lost, kept = pickle.dumps(carrier.put(routes(0))), carrier.put(routes(1))
    held = weakref.ref(kept.handles[0])
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(InvalidRoutes, match=r"sample 1.*freed"):
            delivery.fetch([kept, pickle.loads(lost)])
        del kept
        assert held() is None
    finally:
        gc.enable()


def test_a_folder_is_freed_by_whoever_says_so(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    carrier = delivery.FolderCarrier(tmp_path, name="rank-0")
    first, second = carrier.put_all([routes(0)]), carrier.put_all([routes(1)])
    delivery.free(first)
    assert len(list(tmp_path.iterdir())) == 1
    assert delivery.fetch(second) == [routes(1)]
    with pytest.raises(InvalidRoutes, match=r"can't be read.*No such file.*were freed"):
        delivery.fetch(first, patience=0.1)
    delivery.free(first)  # twice is as good as once
    assert delivery.fetch([*first, *second], on_bad_route="native", patience=0.1) == [None, routes(1)]


def test_what_is_held_and_not_freed_has_a_budget(make: Make) -> None:
    carrier = make(budget=5000)
    first = carrier.put(routes(0))
    with pytest.raises(ReplayError, match=r"more than may be held.*budget=5000 .*not freed.*nobody dropped"):
        carrier.put_all([routes(1), routes(2), routes(3)])
    assert delivery.fetch([first]) == [routes(0)]
    delivery.free([first])
    del first
    gc.collect()
    again = carrier.put_all([routes(1), routes(2), routes(3)])
    assert delivery.fetch(again) == [routes(1), routes(2), routes(3)]


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.numpy").load_file
    sample = RoutedExperts(ids=torch.arange(3).expand(5, 2, 3), layers=[0, 1], num_experts=300)
    delivery.FolderCarrier(tmp_path, cut=1).put(sample)  # the second piece lies at an odd byte
    [shard] = tmp_path.iterdir()
    found = load_file(shard)
    for number in (0, 1):
        assert found[f"{number}.ids"].tolist() == sample.only([number]).ids.tolist()
    assert found["1.recorded"].tolist() == sample.recorded.tolist()


def test_a_shard_that_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    [reference] = delivery.FolderCarrier(tmp_path).put_all([routes(0)])
    [shard] = tmp_path.iterdir()
    hidden = shard.rename(tmp_path / "hidden")
    threading.Timer(0.3, hidden.rename, [shard]).start()
    assert delivery.fetch([reference]) == [routes(0)]


def test_a_disk_that_hangs_is_left_after_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    references, moved = delivery.FolderCarrier(tmp_path).put_all([routes(0)]), threading.Event()
    monkeypatch.setattr(folder, "TensorFile", lambda path: moved.wait())
    begun = time.monotonic()
    with pytest.raises(InvalidRoutes, match=r"the disk didn't answer within 0\.2 s"):
        delivery.fetch(references, patience=0.2)
    assert time.monotonic() - begun < 5
    moved.set()


def test_one_call_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its carriers together."""
    left: list[float] = []
    samples = [delivery.ProcessCarrier().put(routes(seed)) for seed in range(3)]

    def reader(read: Any) -> Any:
        return lambda handles, patience: (left.append(patience), time.sleep(0.1), read(handles, patience))[2]

    for one in samples:
        one.read = reader(one.read)
    delivery.fetch(samples, patience=0.15)
    assert left[0] > left[1] > left[2] == 0.0


def test_a_disk_that_was_full_leaves_nothing_for_the_next_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    carrier, full = delivery.FolderCarrier(tmp_path), OSError(28, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(full))
        with pytest.raises(RouteFileError, match="No space left"):
            carrier.put(routes(0))
    assert not list(tmp_path.iterdir())
    reference = carrier.put(routes(1))
    [shard] = tmp_path.iterdir()
    assert shard.stat().st_size < 1.5 * sum(one.nbytes for one in (routes(1).ids, routes(1).recorded)) + 1000
    assert delivery.fetch([reference]) == [routes(1)]


def test_ids_that_were_checked_are_not_checked_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = routes(0)
    references = make().put_all([sample])
    for name in ("find_outside", "find_twice", "find_constant"):
        monkeypatch.setattr(checks, name, lambda *given: pytest.fail("checked again"))
    assert delivery.fetch(references) == [sample]


def test_a_thousand_steps_leave_nothing(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory nor files; a fetch in each."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # most of the time
    carrier, sizes = make(cut=6), []
    sample = routes(0, 300)
    for step in range(1000):
        references = [carrier.put(sample, step=step)]
        assert delivery.fetch(references, layers=(1, 2)) != [None]
        delivery.free(references)
        del references
        if step % 100 == 99:
            gc.collect()
            sizes.append(own_memory())
            assert len(carriers._held) == len(carrier._put) == 0  # type: ignore[attr-defined]
    assert max(sizes[3:]) - sizes[2] < 2 * 2**20, sizes
    assert not list((tmp_path / "routes").glob("*"))


def bad_references(tmp_path: Path) -> Iterator[tuple[str, Callable[[], Any], str]]:
    def changed(**values: Any) -> Any:
        reference = delivery.ProcessCarrier().put(routes(0))
        for name, value in values.items():
            setattr(reference, name, value)
        return [reference]

    def cut_short() -> Any:
        references = delivery.FolderCarrier(tmp_path / "cut").put_all([routes(0)])
        [shard] = (tmp_path / "cut").glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-100])
        return references

    def flipped() -> Any:
        references = delivery.FolderCarrier(tmp_path / "flipped").put_all([routes(0)])
        [shard] = (tmp_path / "flipped").glob("*.safetensors")
        data = bytearray(shard.read_bytes())
        data[-50] ^= 1
        shard.write_bytes(data)
        return references

    yield "no reference", lambda: [routes(0)], "sample 0: this is no reference"
    yield "none", lambda: [None], "sample 0: this is no reference"
    yield "other tokens", lambda: changed(fingerprint=5), "the routes of another sample"
    yield "another length", lambda: changed(tokens=41), "the routes of another sample"
    yield "another seal", lambda: changed(seals=(5, 5)), "changed on the way"
    yield "a half-written folder", cut_short, "can't be read.*bytes long, and its header says"
    yield "a changed byte", flipped, "changed on the way"


@pytest.mark.parametrize("number", range(7))
def test_what_cannot_be_had_is_an_error_in_words(number: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    _, bad, message = list(bad_references(tmp_path))[number]
    with pytest.raises(InvalidRoutes, match=message):
        delivery.fetch(bad())
    (tmp_path / "again").mkdir()
    _, bad, _ = list(bad_references(tmp_path / "again"))[number]
    if number:
        assert delivery.fetch(bad(), on_bad_route="native") == [None]


def test_layers_that_nobody_put() -> None:
    reference = delivery.ProcessCarrier().put(routes(0))
    with pytest.raises(InvalidRoutes, match=r"nobody put decoder layer 0 of this sample"):
        delivery.fetch([reference], layers=(0, 1))


def test_a_cut_that_does_not_fit() -> None:
    with pytest.raises(ReplayError, match=r"no piece for some layers.*\[12\]"):
        delivery.ProcessCarrier(cut=[range(1, 12)]).put(routes(0))
    with pytest.raises(ReplayError, match="with decoder="):
        delivery.ProcessCarrier(cut=ParallelLayout(pp=2))
    with pytest.raises(ReplayError, match="layers a piece"):
        delivery.ProcessCarrier(cut=0)
    for blocks in ([range(1, 8), range(6, 13)], [(1, 3, 2)], [(1, 1)]):
        with pytest.raises(ReplayError, match="overlap, or have layers out of order"):
            delivery.ProcessCarrier(cut=blocks)
    with pytest.raises(InvalidRoutes, match="these are no routes"):
        delivery.ProcessCarrier().put(torch.zeros(2, 2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 2, 333, 5000])
def test_a_seal_finds_each_change(tokens: int) -> None:
    sample = routes(1, tokens)
    kept = seal(sample)
    assert seal(pickle.loads(pickle.dumps(sample))) == kept
    generator = np.random.default_rng(0)
    flat = sample.ids.view(-1)
    for at in generator.integers(0, len(flat), 20).tolist():
        flat[at] ^= 1
        assert seal(sample) != kept
        flat[at] ^= 1
    row = int(generator.integers(0, tokens))
    sample.recorded[row] = ~sample.recorded[row]
    assert seal(sample) != kept


def swapped(sample: RoutedExperts, where: str) -> RoutedExperts:
    """The same words in other places."""
    ids, recorded = sample.ids.clone(), sample.recorded.clone()
    if where == "tokens":
        ids[[70, 71]] = ids[[71, 70]]
    elif where == "layers":
        ids[:, [3, 7]] = ids[:, [7, 3]]
    elif where == "blocks":
        flat = ids.view(-1)
        flat[: 1 << 13], flat[1 << 13 : 1 << 14] = flat[1 << 13 : 1 << 14].clone(), flat[: 1 << 13].clone()
    elif where == "the tail":
        ids[[-1, -2]] = ids[[-2, -1]]
    elif where == "marks":
        recorded[[1, 2, 3, 4]] = recorded[[2, 1, 4, 3]]
    return sample._derived(ids, recorded, fingerprint=sample.fingerprint)


@pytest.mark.parametrize("where", ["tokens", "layers", "blocks", "the tail", "marks"])
def test_a_seal_finds_what_changed_places(where: str) -> None:
    """A top-8 route of uint8 is one word, and a layer of all tokens keeps its sum."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(2001, 12, 128, generator=generator).topk(8).indices
    marks = torch.ones(2001, dtype=torch.bool)
    marks[[1, 4]] = False
    sample = RoutedExperts(ids=ids, layers=LAYERS, num_experts=128, recorded=marks)
    other = swapped(sample, where)
    assert seal(swapped(sample, "nothing")) == seal(sample) != seal(other)


def test_a_seal_finds_swaps_of_what_differs_in_high_bits_alone() -> None:
    ids = torch.zeros(1500, 1, 8, dtype=torch.uint8) + torch.arange(8, dtype=torch.uint8)
    ids[::2, 0, 7] = 135  # beside 7: the highest bit of a word
    sample = RoutedExperts(ids=ids, layers=[0], num_experts=256)
    seals = {seal(sample)}
    for row in range(1, 1500):
        other = ids.clone()
        other[[0, row]] = other[[row, 0]]
        seals.add(seal(sample._derived(other, sample.recorded)))
    assert len(seals) == 751


def test_a_piece_is_sealed_once_by_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, counted = delivery.ProcessCarrier(cut=6).put(routes(0)), []
    reference.seals = tuple(seal(routes(0).only(block)) for block in reference.blocks)
    monkeypatch.setattr(references, "seal", lambda piece: counted.append(piece) or seal(piece))
    assert delivery.fetch([reference]) == [routes(0)]
    assert len(counted) == 2


def test_a_stage_of_dense_layers_is_sent_nothing_and_lays_out_nothing() -> None:
    references = delivery.ProcessCarrier(cut=2).put_all([routes(1, 5), routes(2, 7)])
    nothing = delivery.fetch(references, layers=())
    here = TokenLayout.packed([5, 7]).gather(nothing, layers=())
    assert (len(here), here.layers) == (12, ())


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", 5])
def test_a_folders_writer_has_a_name_that_files_can_begin_with(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ReplayError, match="bad name of a writer"):
        delivery.FolderCarrier(tmp_path, name=name)
