"""A folder of many samples' routes: whole or not at all. Damage to any byte of it: test_encoding.py."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save

from npu_replay import RoutedExperts, RouteStore, fingerprint
from npu_replay.errors import InvalidRoutes, RouteFileError
from npu_replay.routes import store as route_store
from npu_replay.routes.store import RoutesByTokens


def sample(number: int, tokens: int = 20, experts: int = 64) -> RoutedExperts:
    return RoutedExperts(
        ids=np.argsort(np.random.default_rng(number).random((tokens, 3, experts)), axis=2)[..., :4],
        layers=(1, 2, 5),
        num_experts=experts,
        recorded=np.arange(tokens) < tokens - 1,
        fingerprint=fingerprint(tokens_of(number, tokens)),
        weight_version=f"step {number}",
    )


def tokens_of(number: int, tokens: int = 20) -> list[int]:
    return [number, *range(tokens - 1)]


def store(folder: Path, *samples: tuple[RoutedExperts, str | None], **options: Any) -> RouteStore:
    """A folder with these samples, read again."""
    with RouteStore.writer(folder, **options) as writer:
        for routes, key in samples:
            writer.add(routes, key)
    return RouteStore(folder)


def test_many_samples_come_back_by_key_and_by_tokens(tmp_path: Path) -> None:
    samples = [(sample(number), None) for number in range(200)]
    stored = store(tmp_path, (sample(1), "a/b.c"), *samples, shard_bytes=10_000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    assert repr(stored) == f"RouteStore({str(tmp_path)!r}, 201 samples)"
    assert list(stored)[:2] == ["a/b.c", f"{fingerprint(tokens_of(0)):016x}"]
    assert stored["a/b.c"] == sample(1)
    for number in (0, 40, 41, 199):
        assert stored.of(tokens_of(number)) == sample(number)
        assert stored.of(tokens_of(number)).weight_version == f"step {number}"
    with pytest.raises(KeyError):
        stored["b"]
    with pytest.raises(RouteFileError, match=r"no routes of these tokens.*tokenised again"):
        stored.of([1, 2, 3])
    for shard in tmp_path.iterdir():
        shard.unlink()
    with pytest.raises(RouteFileError, match="no such file"):
        stored["a/b.c"]
    with pytest.raises(RouteFileError, match="no routes in this folder"):
        RouteStore(tmp_path)


def test_what_cant_be_added_stops_none_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RouteStore.writer(tmp_path) as writer:
        writer.add(sample(1))
        for routes, key, words in (
            (sample(1), None, r"key is taken.*same tokens: pass a key of your own"),
            (sample(2).take([0, 1]), None, "neither a key nor a fingerprint"),
            (sample(2), 7, "bad key. Expected text, got 7"),  # in a file it would be "7"
        ):
            with pytest.raises(RouteFileError, match=words):
                writer.add(routes, key)
        writer.add(sample(1), key="the second")
        raise KeyboardInterrupt
    assert RouteStore(tmp_path)["the second"] == RouteStore(tmp_path).of(tokens_of(1))
    assert len(RouteStore(tmp_path)) == 2
    with pytest.raises(RouteFileError, match="under this name"):
        RouteStore.writer(tmp_path)


def test_a_key_of_two_writers_with_other_routes_is_an_error_and_no_other_key_is(tmp_path: Path) -> None:
    """Two ranks that sampled the same short answer; one of them must not make the folder unreadable."""
    for name in ("a", "b"):
        stored = store(tmp_path, (sample(1), "k"), (sample(int(name, 16)), None), name=name)
        assert stored["k"] == sample(1)
    stored = store(tmp_path, (sample(2), "k"), name="c")
    with pytest.raises(RouteFileError, match=r"several samples have these tokens.*in a-0.* and c-0"):
        stored["k"]
    assert stored.of(tokens_of(10)) == sample(10)
    assert RouteStore(tmp_path, shard="c-00000")["k"] == sample(2)


def test_samples_of_the_same_tokens_are_found_by_their_key_alone(tmp_path: Path) -> None:
    """The same question about two images, of two ranks; and of one, whose digests are the same."""
    tokens = tokens_of(1)
    for name, key, number in (("a", "left", 3), ("b", 7, 4), ("c", "7 ", 4)):
        with RouteStore.writer(tmp_path, name=name) as writer:
            writer.add(sample(number).sequence(0, 20, fingerprint(tokens)), sample_key=key)
        if name == "b":  # two are enough not to be told apart
            with pytest.raises(RouteFileError, match=r"several samples have these tokens.*2 samples"):
                RouteStore(tmp_path).of(tokens)
    whole = RouteStore(tmp_path)
    for key, number in (("left", 3), (7, 4), ("7", 4)):
        routes = whole.of(tokens, sample_key=key)
        assert torch.equal(routes.ids, sample(number).ids)
        assert routes.fingerprint == fingerprint(tokens, sample_key=key)
    alone = RouteStore(tmp_path, shard="a-00000")
    for store, key, words in (
        (whole, None, r"several samples have these tokens.*3 samples"),
        (whole, "right", "no routes of these tokens"),
        (alone, None, r"no routes of these tokens.*1 have these tokens and another"),
        (alone, 7, r"no routes of these tokens.*1 have these tokens and another"),
    ):
        with pytest.raises(RouteFileError, match=words):
            store.of(tokens, sample_key=key)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(side_effect=RouteFileError("the file can't be written (no space left)"))
    writer = RouteStore.writer(tmp_path)
    writer.add(sample(1), key="k")
    monkeypatch.setattr(route_store, "write_whole", full)
    for attempt in (writer.flush, lambda: writer.add(sample(2, experts=300), key="of another model")):
        with pytest.raises(RouteFileError, match="no space left"):
            attempt()
    monkeypatch.undo()
    writer.add(sample(2, experts=300), key="of another model")
    writer.flush()
    assert RouteStore(tmp_path)["k"] == sample(1)
    assert RouteStore(tmp_path)["of another model"] == sample(2, experts=300)
    monkeypatch.setattr(route_store, "write_whole", full)
    with pytest.raises(RouteFileError, match="no space left"):
        store(tmp_path, (sample(1), None), name="x")


# What is damaged or foreign


def test_a_folder_with_a_file_of_something_else_is_refused_by_its_name(tmp_path: Path) -> None:
    stored = store(tmp_path, (sample(1), "k"))
    other = tmp_path / "model.safetensors"
    for content in (b"", b"hello", save({"weight": sample(1).ids}), save({}, {"format": "pt"})):
        other.write_bytes(content)
        with pytest.raises(RouteFileError, match=r"can't be read|doesn't hold routes") as caught:
            RouteStore(tmp_path)
        assert caught.value.where == str(other)
    assert RouteStore(tmp_path, shard="routes-00000")["k"] == stored["k"] == sample(1)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))], ids=["copy", "pickle"]
)
def test_a_store_that_was_read_from_can_be_copied(tmp_path: Path, copied: Any) -> None:
    """To a loader's worker processes, say."""
    stored = store(tmp_path, (sample(1), None))
    for reader in (stored, copied(stored), stored):
        assert reader.of(tokens_of(1)) == copied(reader).of(tokens_of(1)) == sample(1)


# Files that change, writers that are killed, keys that mislead


def test_what_was_read_stays_when_the_shard_is_overwritten_and_a_shorter_one_is_an_error(
    tmp_path: Path,
) -> None:
    """A memory map shows the new bytes, and where there are none the process dies."""
    stored = store(tmp_path, (sample(1, tokens=5000), "k"))
    (shard,) = tmp_path.glob("*.safetensors")
    read = stored["k"]
    with shard.open("r+b") as file:  # the ids, not the header
        file.seek(-3000, os.SEEK_END)
        file.write(b"\xff" * 3000)
    assert read == sample(1, tokens=5000)
    with pytest.raises(RouteFileError, match=r"changed after they were written"):
        stored["k"]
    os.truncate(shard, 10_000)
    with pytest.raises(RouteFileError, match=r"bytes early: somebody writes to it"):
        stored["k"]


def test_a_shard_of_an_earlier_job_is_not_read_for_one_of_a_later(tmp_path: Path) -> None:
    stored = store(tmp_path, (sample(1), "k"))
    store(tmp_path / "other", (sample(2), "k"))
    os.replace(tmp_path / "other" / "routes-00000.safetensors", tmp_path / "routes-00000.safetensors")
    with pytest.raises(RouteFileError, match="changed after they were written"):
        stored["k"]


def test_routes_of_other_tokens_under_the_key_of_these_are_refused(tmp_path: Path) -> None:
    keys = [route_store.key_of(fingerprint(tokens_of(number))) for number in (2, 4)]
    stored = store(tmp_path, (sample(1), keys[0]), (sample(3, tokens=7).take(range(7)), keys[1]))
    with pytest.raises(RouteFileError, match="routes belong to other tokens"):
        stored.of(tokens_of(2))
    with pytest.raises(RouteFileError, match=r"another number of tokens.*20 .*got 7"):
        stored.of(tokens_of(4))  # which say nothing of their tokens


# Layers that are the same in all rows


def constant(tokens: int, experts: int = 64) -> RoutedExperts:
    """As an engine's array that was never looked at."""
    ids = sample(1, tokens + 1, experts).ids[:tokens].clone()
    ids[:, 1] = torch.arange(4)
    return RoutedExperts(ids=ids, layers=(1, 2, 5), num_experts=experts)


def test_a_constant_layer_in_a_folder_is_refused_but_where_the_tokens_explain_it(tmp_path: Path) -> None:
    same = [7] * 100
    others = list(range(100))
    keys = [route_store.key_of(fingerprint(tokens)) for tokens in (same, others)]
    stored = store(tmp_path, *((constant(100), key) for key in keys))
    assert stored.of(same) == constant(100)
    for read in (lambda: stored.of(others), lambda: stored[keys[0]]):
        with pytest.raises(InvalidRoutes, match="layer 2: all 100 recorded rows are the same") as caught:
            read()
        assert "routes-00000.safetensors" in caught.value.where


# A run's routes by their tokens


def by_seed(seed: int, version: int | None = None) -> RoutedExperts:
    ids = torch.rand(5, 2, 8, generator=torch.Generator().manual_seed(seed)).topk(2).indices
    return RoutedExperts(ids=ids, layers=[0, 1], num_experts=8, weight_version=version)


def test_other_rollouts_of_the_same_fingerprint_are_an_error_until_an_update_took_the_first() -> None:
    by_tokens = RoutesByTokens(1 << 20)
    by_tokens.put(7, by_seed(1), rollout=True)
    by_tokens.put(7, by_seed(1), rollout=True)
    with pytest.raises(InvalidRoutes, match="two samples have the same tokens"):
        by_tokens.put(7, by_seed(2), rollout=True)
    assert by_tokens.get(7) == (by_seed(1), True), "what was there stays"
    assert (by_tokens.bytes, len(by_tokens)) == (by_seed(1).ids.nbytes + 5, 1)
    with pytest.raises(InvalidRoutes, match="two samples have the same tokens"):
        by_tokens.put(7, by_seed(2), rollout=True)
    by_tokens.get(7, update=True)
    by_tokens.put(7, by_seed(2), rollout=True)
    assert by_tokens.get(7) == (by_seed(2), True)


@pytest.mark.parametrize(("changed", "known", "apart"), [(10, 50, ""), (11, 50, "11%"), (50, 5, "50%")])
def test_one_answer_that_was_sampled_twice_has_the_newer_routes(changed: int, known: int, apart: str) -> None:
    """Of 50 tokens in 2 layers; its routes differ where an engine rounds otherwise in another batch.
    Rows that aren't known make no two answers alike."""
    first = torch.tensor([[[0, 1], [2, 3]]]).repeat(50, 1, 1)
    second = first.clone()
    second[:changed, 0] = torch.tensor([4, 5])
    recorded = torch.arange(50) >= 50 - known
    kept = RoutesByTokens(1 << 20)
    refused = pytest.raises(InvalidRoutes, match=rf"10% of the token-layers at most.*got .* {apart} apart")
    for ids, expected in ((first, nullcontext()), (second, refused if apart else nullcontext())):
        routes = RoutedExperts(ids=ids, layers=[0, 1], num_experts=8, recorded=recorded)
        with expected:
            kept.put(7, routes, rollout=True)
    if not apart:
        assert kept.get(7) == (routes, True)
        assert kept.replaced == 1


def test_newer_weights_and_newer_records_take_the_place_of_older_ones() -> None:
    """And what was dropped or cleared is waited for no longer."""
    kept = RoutesByTokens(2 * (by_seed(1).ids.nbytes + 5))
    kept.put(7, by_seed(1, version=1), rollout=True)
    kept.put(7, by_seed(2, version=2), rollout=True)
    kept.put(8, by_seed(1), rollout=False)
    kept.put(8, by_seed(2), rollout=False)
    assert kept.get(7) == (by_seed(2, version=2), True)
    assert kept.replaced == 2
    kept.put(9, by_seed(3), rollout=True)
    assert kept.get(7) == (None, False)
    kept.put(7, by_seed(3), rollout=True)
    kept.clear()
    assert kept.get(7) == (None, False)
    kept.put(7, by_seed(4), rollout=True)
    assert kept.get(7) == (by_seed(4), True)


def test_routes_without_a_key_move_to_the_first_sample_that_asks() -> None:
    by_tokens = RoutesByTokens(1 << 20)
    by_tokens.put(7, by_seed(1), rollout=True)
    by_tokens.put(8, by_seed(2), rollout=False)
    for mark, to in ((7, 7), (7, 71), (7, 72), (8, 81), (9, 91)):
        by_tokens.move(mark, to)
    assert by_tokens.get(71) == (by_seed(1), True)
    assert [by_tokens.get(mark)[0] for mark in (7, 72, 81, 91)] == [None] * 4
    assert by_tokens.get(8) == (by_seed(2), False), "a record has its own key"
