"""verl's record_file and replay_file: which samples are written and read. tests/on_verl has the engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from npu_replay import RouteStore, fingerprint
from npu_replay.compat.verl.files import Files

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
        found = store.of(tokens)
        assert torch.equal(found.ids[:rows], ids(rows, number))
        assert found.recorded.tolist() == [row < rows for row in range(len(tokens))]
        assert found.fingerprint == fingerprint(tokens)


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
