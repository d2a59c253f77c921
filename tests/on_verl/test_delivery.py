"""Keys and references in the place of routes, from verl's agent loops through what its batches go through.

On the real classes of the verl that is on the path. What an engine's pass makes of them: engine_cases.py.
"""

from __future__ import annotations

import copy
import importlib
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import npu_replay
from benchmarks.delivery_plan import MARKS
from npu_replay import InvalidRoutes, ReplayError, RoutedExperts, RoutedModel, fingerprint
from npu_replay.compat.verl import batch_routes, r3_store, rollout_checks
from npu_replay.compat.verl.batch_routes import COLUMN, RoutesByKey, keys_in
from npu_replay.compat.verl.r3_store import cut_of
from npu_replay.compat.verl.tensors import GivenRoutes
from npu_replay.environment import DELIVERY
from npu_replay.errors import RouterError
from npu_replay.routes.arguments import StageLabels
from on_verl import test_rollout as loops
from on_verl.engine_job import packing, without_padding
from on_verl.test_rollout import SAMPLED, Turn, deep, guarded, installed
from piece_files import FileCarrier

__all__ = ["installed"]
pytestmark = pytest.mark.verl
LAYERS = (1, 2, 3, 4)
COUNT = 8
MODEL = RoutedModel.of(loops.DEEP)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what a worker puts lies, in the place of Ray's object store."""
    functions = importlib.import_module("verl.utils.attention_utils")
    monkeypatch.setattr(functions, "_get_attention_functions", packing)  # others want flash-attn
    monkeypatch.setenv(DELIVERY, "ray")
    monkeypatch.setattr(r3_store, "RayCarrier", partial(FileCarrier, tmp_path / "routes"))
    return tmp_path / "routes"


def worker(*turns: Turn) -> Any:
    return guarded(*(turns or [Turn(SAMPLED[: 3 + n], change=deep) for n in range(COUNT)]))


def batch_of(*turns: Turn) -> Any:
    """What the trainer has after a rollout."""
    return loops.postprocessed(worker(*turns), len(turns) or COUNT)


def keyed(data: Any) -> torch.Tensor:
    """What an engine's batch has while a pass runs: a key in the place of each mark."""
    marks = data.batch["routed_experts"]
    references = data.non_tensor_batch[COLUMN]
    keys = [batch_routes.rows_of(key, marks.shape[1]) for key in keys_in(marks, references)]
    return torch.stack(keys) * (marks != 0)


def of_a_rank(layers: tuple[int, ...] = LAYERS) -> tuple[RoutesByKey, r3_store.R3Store]:
    by_key = RoutesByKey()
    by_key.has(layers)
    return by_key, r3_store.R3Store(by_key)


def received(references: Any, layers: tuple[int, ...] = LAYERS, tokens: Any = None) -> RoutesByKey:
    """What an engine's rank of these layers has of a batch's references."""
    by_key, store = of_a_rank(layers)
    store.receive(references, tokens)
    return by_key


def check(data: Any, layers: tuple[int, ...] = LAYERS) -> int:
    """Each row of a worker's batch gets the routes of its own tokens; how many samples it has."""
    references = batch_routes.references_in(data)
    tokens = data["input_ids"].unbind()
    assert references is not None
    keys = keys_in(data["routed_experts"], references)
    by_key = received(references, layers, dict(zip(keys, tokens, strict=True)))
    assert not by_key.bad(reference.key for reference in references)
    with batch_routes.keys_in_place(data, "routed_experts", keys):
        good, bad = GivenRoutes.of(data["routed_experts"], None, MODEL).routes(
            from_rollout=True, store=by_key
        )
    assert not bad
    for number, (ids, reference) in enumerate(zip(tokens, references, strict=True)):
        routes = good[number]
        assert reference.fingerprint == fingerprint(ids)
        assert routes.layers == layers
        assert routes.ids.data_ptr() == by_key.of(reference.key).ids.data_ptr(), "it was copied"
        assert routes.recorded.tolist() == [True] * (len(ids) - 1) + [False]
        expected = deep(np.empty(len(ids) - 1))[:, list(layers)]
        np.testing.assert_array_equal(routes.ids[:-1].numpy(), expected)
    return len(tokens)


def test_a_rollout_puts_its_routes_away(folder: Path) -> None:
    data = batch_of()
    assert data.batch["routed_experts"].dtype == torch.int16
    assert tuple(data.batch["routed_experts"].shape[2:]) == (1, 1)
    assert data.batch["routed_experts"].element_size() == MARKS  # bytes a token
    assert len(pickle.dumps(data.non_tensor_batch[COLUMN])) < 700 * COUNT
    assert len(list(folder.glob("*.pieces"))) == COUNT
    moved = without_padding(data)
    for layers in (LAYERS, (2, 3)):
        assert check(moved, layers) == COUNT


def stages(*sizes: int) -> list[list[int]]:
    """The layers of stages of so many."""
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


LAYOUT = [["embedding", *["decoder"] * 2], ["decoder"] * 3, ["decoder"] * 3, ["decoder"] * 4, ["loss"]]
FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
PIPELINES: dict[str, tuple[int, int, int, dict[str, Any], list[list[int]]]] = {
    "the issue's job": (94, 0, 8, {FIRST: 11, LAST: 11}, stages(11, 12, 12, 12, 12, 12, 12, 11)),
    "dense layers at first": (9, 3, 3, {}, [[], [3, 4, 5], [6, 7, 8]]),
    "embedding and loss count": (
        *(10, 0, 3, {f"account_for_{part}_in_pipeline_split": True for part in ("embedding", "loss")}),
        stages(3, 4, 3),
    ),
    "virtual stages": (8, 0, 2, {"virtual": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    "a layout": (12, 1, 5, {"pipeline_model_parallel_layout": LAYOUT}, [[1], *stages(2, 3, 3, 4)[1:], []]),
    "a HybridModel's pattern": (4, 1, 2, {"hybrid_layer_pattern": "*-*E*E|*E"}, [[1, 2], [3]]),
    "a pattern that is even in symbols": (3, 0, 2, {"hybrid_override_pattern": "*E*E*E"}, [[0], [1, 2]]),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_each_stage_of_the_actors_pipeline_reads_one_piece_of_its_own(name: str, tmp_path: Path) -> None:
    count, dense, pp, override, wanted = PIPELINES[name]
    if "layout" in name:
        pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    virtual = override.get("virtual")
    megatron = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": virtual}
    megatron["override_transformer_config"] = {k: v for k, v in override.items() if k != "virtual"}
    layers = tuple(range(dense, count))
    model = RoutedModel(layers=layers, num_layers=count, num_experts=8, topk=2)
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {"megatron": megatron}}})
    ids = torch.rand(3, len(layers), 8).topk(2).indices
    routes = RoutedExperts(ids=ids, layers=layers, num_experts=8)
    blocks = FileCarrier(tmp_path, cut=cut_of(config, model)).put(routes).blocks
    assert list(map(list, blocks)) == [stage for stage in wanted if stage]


def test_a_pipeline_that_is_not_known_is_cut_evenly(caplog: pytest.LogCaptureFixture) -> None:
    model = RoutedModel(layers=tuple(range(8)), num_layers=8, num_experts=8, topk=2)
    megatron = {"pipeline_model_parallel_size": 4, "override_transformer_config": {FIRST: 7}}
    assert cut_of({"actor_rollout_ref": {"actor": {"megatron": megatron}}}, model) == 2
    assert caplog.text.count("the split of the actor's pipeline isn't known") == 1


def test_references_go_where_their_samples_go_in_the_workers() -> None:
    """Balanced over the ranks by the trainer, and every way in which a worker moves a batch."""
    from verl.utils import seqlen_balancing
    from verl.utils import tensordict_utils as tu

    data = batch_of()
    sizes = data.batch["attention_mask"].sum(dim=1).tolist()
    parts = seqlen_balancing.get_seqlen_balanced_partitions(sizes, k_partitions=2, equal_size=True)
    data.reorder(torch.tensor([number for part in parts for number in part]))
    moved = without_padding(data)
    assert check(moved) == COUNT
    moved = tu.index_select_tensor_dict(moved, torch.tensor([5, 0, 7, 2, 1, 6, 3, 4]))
    moved = tu.union_tensor_dict(moved, tu.get_tensordict({"advantages": torch.zeros(COUNT, 2)}))
    moved = tu.concat_tensordict(tu.chunk_tensordict(moved, 4)[::-1])
    moved, pad = tu.pad_to_divisor(moved, 5)
    assert check(moved) == COUNT + pad
    moved = pickle.loads(pickle.dumps(tu.unpad(moved, pad)))
    for part in tu.make_iterator(moved, 4, epochs=2, seed=1, dataloader_kwargs={"shuffle": True}):
        assert check(part) == 4
        micro, _ = seqlen_balancing.rearrange_micro_batches(part, max_token_len=2 * max(sizes))
        assert len(micro) > 1
        assert sum(check(batch) for batch in micro) == 4


@pytest.mark.parametrize(("value", "lora"), [("", False), ("ray", False), ("", True)])
def test_the_reference_is_sent_no_routes(value: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ids nor what stands for them; whoever else gets the batch has them, an actor that stands in for
    the reference too."""
    module = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    trainer = module.RayPPOTrainer
    monkeypatch.setenv(DELIVERY, value)
    npu_replay.install()
    data = batch_of()
    take = Mock(side_effect=InterruptedError)
    made = trainer.__new__(trainer)
    made.ref_in_actor = lora
    made.use_legacy_worker_impl = "disable"
    made.ref_policy_wg = SimpleNamespace(compute_ref_log_prob=take)
    made.actor_rollout_wg = SimpleNamespace(compute_log_prob=take)
    for leave in (npu_replay.uninstall, npu_replay.install):
        with pytest.raises(InterruptedError):
            made._compute_ref_log_prob(data)
        leave()
    sent = [set(call.args[0].keys()) for call in take.call_args_list]
    routes = {"routed_experts", COLUMN} if value else {"routed_experts"}
    assert sent[1] - sent[0] == (set() if lora else routes)
    assert "input_ids" in sent[0]
    assert "routed_experts" in data.batch.keys()  # noqa: SIM118


def test_samples_without_routes_take_none_from_the_others() -> None:
    """Aborted ones, and those that were never put: verl's padding has zeros in the place of keys."""
    turns = [Turn(SAMPLED[: 3 + n], change=deep) for n in range(4)]
    turns[1] = Turn([20], stop="aborted", change=loops.NO_ROUTES)
    data = batch_of(*turns)
    references = list(data.non_tensor_batch[COLUMN])
    data.batch["routed_experts"][2] = 0
    mask = data.batch["attention_mask"].bool()
    asked = keys_in(data.batch["routed_experts"], references)
    tokens = {key: ids[kept] for key, ids, kept in zip(asked, data.batch["input_ids"], mask, strict=True)}
    by_key = received(references, tokens=tokens)
    keys = keyed(data)
    for part in (slice(0, 4), slice(2, 3)):  # alone in a micro-batch, too
        good, bad = GivenRoutes.of(keys[part], mask[part], MODEL).routes(from_rollout=True, store=by_key)
        assert not bad
        assert {routes.layers for routes in good.values()} == {LAYERS}
        recorded = [bool(good[number].recorded.any()) for number in range(len(good))]
        assert recorded == [True, False, False, True][part]


def bad_of(data: Any, rows: torch.Tensor, by_key: RoutesByKey | None = None) -> str:
    """Why a batch's only sample has no routes."""
    mask = data.batch["attention_mask"].bool()
    good, bad = GivenRoutes.of(rows, mask, MODEL).routes(from_rollout=True, store=by_key)
    assert not good
    return str(bad[0])


def test_a_sample_without_its_routes_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reference stayed behind; what it refers to was lost; or the door has refused its routes."""
    turn = Turn(SAMPLED[:4], change=deep)
    data = batch_of(turn)
    stayed = bad_of(data, data.batch["routed_experts"])
    assert "the column npu_replay_routes beside routed_experts" in stayed
    for file in folder.iterdir():
        file.unlink()
    by_key = received(list(data.non_tensor_batch[COLUMN]))
    assert "can't be read" in bad_of(data, keyed(data), by_key)
    monkeypatch.setattr(rollout_checks, "PROOF", 0)
    rollout_checks._warned.clear()
    monkeypatch.setattr(r3_store, "from_batch", lambda *a, **k: (_ for _ in ()).throw(InvalidRoutes("bad")))
    data = batch_of(turn)
    assert data.non_tensor_batch[COLUMN].tolist() == [None]
    assert "go without their routes: [npu_replay] bad" in caplog.text
    assert "refused when the rollout handed them over" in bad_of(data, keyed(data))


def test_routes_are_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_each = Mock(wraps=r3_store.fetch_each)
    monkeypatch.setattr(r3_store, "fetch_each", fetch_each)
    data = batch_of()
    references = list(data.non_tensor_batch[COLUMN])
    by_key, store = of_a_rank()
    for part in (references, references, [*references[:2], None]):
        store.receive(part)
    rows = int(data.batch["attention_mask"].sum())  # a last token's too, which says that it has none
    assert by_key.nbytes == rows * len(LAYERS) * MODEL.topk
    newer = copy.copy(references[0])
    newer.step = 1
    newer.key = 5
    store.receive([newer])
    store.receive(references)
    asked = [len(call.args[0]) for call in fetch_each.call_args_list]
    assert asked == [COUNT, 0, 0, 1, COUNT], "an older step's are not kept"


def test_without_steps_of_the_job_nothing_grows_without_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(r3_store, "_SAMPLES", 5)
    putter = r3_store.Putter(FileCarrier(folder), MODEL, keeps=True)
    tokens = np.arange(8)
    batches = list[Any]()
    routes = np.concatenate([deep(tokens[:-1]), deep(tokens[:1]) * 0])
    alive = WeakSet[Any]()
    by_key, store = of_a_rank()
    for number in range(8):
        batches.append([putter.put(routes, tokens + number, -1)[1]])
        alive.add(batches[-1][0])
        for part in (batches[-1], batches[-1], [], batches[max(0, number - 1)]):
            store.receive(part)
        assert len(by_key) == min(number + 1, 4)
    batches.clear()
    assert len(list(alive)) == 5


@pytest.mark.parametrize(("version", "reported", "step"), [(7, -1, 7), (0, -1, 0), (7, 2, 2), (None, -1, -1)])
def test_the_weights_version_stands_for_a_step_where_the_trainer_says_none(
    version: int | None, reported: int, step: int
) -> None:
    made = worker()
    putter = r3_store.Putter.of(made, MODEL)
    assert putter is not None
    output = SimpleNamespace(
        prompt_ids=[1],
        response_ids=[2, 3],
        routed_experts=deep(np.empty(3)),
        extra_fields={"max_global_steps": version},
    )
    putter.put_away(output, reported)
    assert output.extra_fields[COLUMN].step == step


@pytest.mark.parametrize("queued", [True, False])
def test_references_live_as_long_as_may_be_trained_on_them(queued: bool) -> None:
    """A queue pickles them past Ray: the worker that put them keeps those of the last three steps."""
    made = worker()
    if queued:
        made.__class__ = type("AgentLoopWorkerTQ", (type(made),), {})  # in whatever module a release has it
    putter = r3_store.Putter.of(made, MODEL)
    assert putter is not None
    tokens = np.arange(8)
    alive = WeakSet[Any]()
    for step in range(6):
        rows = np.concatenate([deep(tokens[:-1]), deep(tokens[:1]) * 0])
        alive.add(putter.put(rows, tokens + step, step)[1])
        assert len(alive) == (min(step + 1, 3) if queued else 0)


def test_nothing_is_put_away_for_a_validation(folder: Path) -> None:
    made = worker(Turn(SAMPLED[:4], change=deep))
    assert loops.run(worker=made, validate=True).routed_experts is None
    assert not list(folder.glob("*.pieces"))


INTERVAL = "moe_load_balance_metrics_interval"


@pytest.mark.parametrize(
    ("value", "model", "changes", "words"),
    [
        ("redis", loops.DEEP, {}, "Expected one of ray,.*got redis"),
        ("/a/folder", loops.DEEP, {}, "got /a/folder.*RouteStore.*record_file"),
        ("ray", None, {}, r"config\.json"),
        ("ray", loops.DEEP, {f"actor_rollout_ref__rollout__{INTERVAL}": 5}, INTERVAL),  # verl's, of ids
    ],
)
def test_what_can_not_be_put_away_is_refused(
    value: str, model: Any, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DELIVERY, value)
    made = guarded(Turn(SAMPLED[:4], change=deep), **changes)
    made.model_config.hf_config = model
    with pytest.raises(ReplayError, match=words):
        loops.run(worker=made)


def test_pieces_that_count_layers_otherwise_than_a_hybrid_models_pattern_are_refused(tmp_path: Path) -> None:
    """The config counts symbols and the pattern pairs of them: layer 1 is in both, and another one."""
    ids = torch.rand(3, 2, 8).topk(2).indices
    routes = RoutedExperts(ids=ids, layers=(1, 3), num_experts=8)
    reference = FileCarrier(tmp_path).put(routes)
    with pytest.raises(RouterError, match=r"the pieces have other labels.*Expected \(0, 1\), got \(1, 3\)"):
        received([reference], StageLabels([1], whole=[0, 1]))
