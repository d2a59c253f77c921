"""What an engine keeps of routes, without verl: in memory by key, and of record_file in files.

tests/on_verl has the engines.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from npu_replay import RoutedExperts, RoutedModel, RouteStore, delivery, fingerprint
from npu_replay.compat.verl import batch_routes
from npu_replay.compat.verl.batch_routes import R2Store, RoutesByKey, are_refused, refused_rows
from npu_replay.compat.verl.files import Files
from npu_replay.compat.verl.r3_store import Putter
from npu_replay.compat.verl.tensors import GivenRoutes
from piece_files import FileCarrier

MODEL = RoutedModel(layers=(1, 3), num_layers=4, num_experts=8, topk=2)
TOKENS = 6


def routes(layer: int = 1) -> RoutedExperts:
    ids = torch.rand(TOKENS, 1, 8, generator=torch.Generator().manual_seed(layer)).topk(2).indices
    return RoutedExperts(ids=ids, layers=(layer,), num_experts=8)


def filled() -> tuple[RoutesByKey, R2Store]:
    by_key = RoutesByKey()
    by_key.has((1, 3))
    return by_key, R2Store(by_key)


def test_routes_are_held_for_their_step_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    by_key, store = filled()
    keys = []
    for step in range(4):
        store.begin(step, 0)
        keys += store.keep(0, 1, [routes()])
        assert by_key.lacking(keys[-2:]) == []
        assert len(by_key) == min(step + 1, 2)
        store.trained()
    monkeypatch.setattr(batch_routes, "_PASSES", 3)  # that nothing trains on are a step, too
    (by_key, store) = filled()
    most = 0
    for number in range(20):
        store.begin(number, 0)
        store.keep(0, 1, [routes()])
        most = max(most, len(by_key))
    assert most == 6


def test_a_samples_key_is_the_same_on_all_chunks_and_no_other_passes_or_replicas() -> None:
    by_key, store = filled()
    store.begin(5, 0)
    first = [store.keep(0, 2, [routes(1)] * 2), store.keep(0, 2, [routes(1)] * 2)]
    assert [store.keep(1, 2, [routes(3)] * 2), store.keep(1, 2, [routes(3)] * 2)] == first
    assert by_key.of(first[0][0]).layers == (1, 3)
    for layer in (1, 3):
        assert by_key.of(first[0][0]).only((layer,)) == routes(layer)
    assert [store.keep(2, 2, []), store.keep(2, 2, [])] == first, "a dense chunk's, too"
    store.begin(5, 1)
    other = store.keep(0, 2, [routes()] * 2)
    store.begin(6, 0)
    last = store.keep(0, 2, [routes()] * 2)
    assert len({*first[0], *first[1], *other, *last}) == len(by_key) == 8
    by_key.has((1,))
    assert not len(by_key), "other layers drop all"
    _, anew = filled()  # a rank that was started anew has seen no pass, and works the same keys out
    anew.begin(6, 0)
    assert anew.keep(0, 2, [routes()] * 2) == last


def test_with_a_top_k_of_1_zeros_of_a_rollout_are_no_route_and_recorded_ones_are_expert_0(
    tmp_path: Path,
) -> None:
    """However a rollout's come: by reference, for all chunks of an engine, or with a micro-batch."""
    model = RoutedModel(layers=(1, 3), num_layers=4, num_experts=8, topk=1)
    rows = np.zeros((8, 4, 1), np.int16)
    rows[:, [1, 3], 0] = np.arange(8)[:, None] % 7 + 1
    rows[[3, 7]] = 0
    _, reference = Putter(FileCarrier(tmp_path), model, keeps=False).put(rows, np.arange(8), 0)  # type: ignore[arg-type]
    assert reference is not None
    carried = torch.nested.as_nested_tensor([torch.from_numpy(rows)], layout=torch.jagged)
    batch = GivenRoutes.of(carried, None, model)
    ways = (
        delivery.fetch([reference])[0],
        batch.checked((1, 3), torch.arange(8)[None])[1],
        batch.routes(from_rollout=True)[0][0],
    )
    for routes in ways:
        assert isinstance(routes, RoutedExperts)
        assert routes.recorded.tolist() == [bool(row.any()) for row in rows]
    assert batch.routes(from_rollout=False)[0][0].recorded.all()


def test_rows_of_a_refused_sample_are_no_row_of_any_model() -> None:
    models = ((1, 256, np.uint8), (1, 512, np.int16), (8, 64, np.uint8), (8, 256, np.uint8))
    for topk, experts, dtype in models:
        rows = torch.from_numpy(refused_rows(3, np.empty((0, 2, topk), dtype)))
        assert are_refused(rows, experts)
        assert are_refused(rows.to(torch.int64), experts)
        assert not are_refused(torch.zeros_like(rows), experts)
    right = torch.full((3, 2, 1), 255, dtype=torch.uint8)
    assert not are_refused(right, 256)


# Files

CONFIG = SimpleNamespace(
    num_layers=4,
    moe_layer_freq=1,
    num_moe_experts=64,
    moe_router_topk=4,
    num_layers_in_first_pipeline_stage=None,
    num_layers_in_last_pipeline_stage=None,
    account_for_embedding_in_pipeline_split=False,
    account_for_loss_in_pipeline_split=False,
    pipeline_model_parallel_layout=None,
)
SAMPLES = [list(range(20)), list(range(100, 130)), list(range(200, 225))]


def ids(rows: int, seed: int = 0) -> torch.Tensor:
    scores = np.random.default_rng(seed).random((rows, 4, 64))
    return torch.from_numpy(np.argsort(scores, axis=2)[..., :4].astype(np.uint8))


def jagged(parts: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(part) for part in parts], layout=torch.jagged)


def batch(rows: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "input_ids": jagged(SAMPLES),
        "routed_experts": jagged([ids(count, seed + number) for number, count in enumerate(rows)]),
    }


def recorded(folder: Path, *passes: dict[str, torch.Tensor]) -> RouteStore:
    files = Files.of(SimpleNamespace(record_file=str(folder), replay_file=None))
    assert files is not None
    for data in passes:
        files.give(data)
        files.keep(data, None, CONFIG, from_rollout=True)
    return RouteStore(folder)


def test_each_sample_is_written_with_one_row_a_token(tmp_path: Path) -> None:
    """A rollout engine has no row for the last token; a record has one."""
    store = recorded(tmp_path, batch([20, 29, 25]))
    for number, (tokens, rows) in enumerate(zip(SAMPLES, (20, 29, 25), strict=True)):
        sample = store.of(tokens)
        assert torch.equal(sample.ids[:rows], ids(rows, number))
        assert sample.recorded.tolist() == [row < rows for row in range(len(tokens))]
        assert sample.fingerprint == fingerprint(tokens)


def test_rows_that_may_be_another_samples_are_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = recorded(tmp_path, batch([28, 7, 25]))
    assert list(store) == [f"{fingerprint(SAMPLES[2]):016x}"]
    assert caplog.text.count("not written: [npu_replay] the routes have another number of tokens") == 2


def test_of_a_sample_the_first_pass_is_written(tmp_path: Path) -> None:
    """Updates come after the log-probs with the same routes; a later step would have other ones."""
    store = recorded(tmp_path, batch([20, 30, 25]), batch([20, 30, 25], seed=50))
    assert torch.equal(store.of(SAMPLES[0]).ids, ids(20))
