"""verl's RouterReplay on each router without a pass of an engine, and what verl's Ulysses pads, on the
Megatron-core on the path. What verl's functions do in a pass: engine_cases.py."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.compat.megatron import hybrid
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.megatron_backports.router_replay import is_idle
from npu_replay.compat.verl import tensors
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import EnginePass, current
from npu_replay.errors import MicroBatchError, RouterError
from npu_replay.following.fed_sequences import fed_sequences
from npu_replay.smoke import megatron_model
from sessions.test_follow import packed as fed_packed
from sessions.test_follow import texts, ulysses_padded
from zoo.gpt import VARIANTS, build, hooks, perturbed
from zoo.outcome import gradients, same

# Routers are given other weights for a replay, so that it shows.
pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("unjudged")]


def trainer(seed: int = 7) -> Any:
    """A model that asks for replay and its micro-batches, with what a pass asks of an engine."""
    job: Any = build(VARIANTS["softmax_after_topk"] | {"enable_routing_replay": True}, "full", seed)
    job.module = [job.model]
    job.tf_config = job.model.config
    job.engine_config = SimpleNamespace(router_replay=SimpleNamespace(mode="R2"))
    return job


@pytest.fixture(scope="module", autouse=True)
def lent() -> Iterator[None]:
    with npu_replay.compat.cpu.lend():
        megatron_model.start()
        yield


@pytest.fixture(scope="module")
def verl() -> Iterator[SimpleNamespace]:
    """What is called of the verl that is on the path."""
    patch: Any = importlib.import_module("verl.utils.megatron.router_replay_patch")
    utils = importlib.import_module("verl.utils.megatron.router_replay_utils")
    patch.apply_router_replay_patch()
    yield SimpleNamespace(utils=utils, replay=patch.RouterReplay, actions=patch.RouterReplayAction)
    router_init._framework.clear()  # other tests' routers have Megatron's


def own_replays(job: Any) -> list[Any]:
    replays = [getattr(module, "router_replay", None) for module in job.model.modules()]
    return [replay for replay in replays if replay is not None]


def test_each_router_has_a_replay_of_verls_and_no_model_that_was_thrown_away(verl: SimpleNamespace) -> None:
    """T18: verl's own list is never pruned. Megatron's has the same replays: an API that acts on others would
    act on none."""
    megatron: Any = importlib.import_module("megatron.core.transformer.moe.router_replay").RouterReplay
    gone = trainer(seed=1)
    thrown = own_replays(gone)
    job = trainer()
    del gone
    gc.collect()
    assert all(isinstance(replay, verl.replay) for replay in own_replays(job))
    assert all(is_idle(replay) for replay in own_replays(job)), "nobody has to ask them without an action"
    for listed in (verl.replay.router_instances, megatron.global_router_replay_instances):
        assert [
            replay for replay in listed if any(replay is other for other in own_replays(job))
        ] == own_replays(job)
        assert not any(replay is other for replay in listed for other in thrown)


@pytest.mark.parametrize("of", ["verl", "Megatron"])
def test_a_router_records_and_replays_by_its_action_recomputes_too(verl: SimpleNamespace, of: str) -> None:
    """Whichever library's enum says so: live routes in silence would train on other experts. verl's queue is
    read as its own patch of the routing reads it, where a backward follows each forward."""
    megatron: Any = importlib.import_module("megatron.core.transformer.moe.router_replay")
    actions = verl.actions if of == "verl" else megatron.RouterReplayAction
    job = trainer()
    with npu_replay.record(job.model) as recording:
        job.run()
    own = recording.routes

    def act(action: Any, routes: RoutedExperts | None = None) -> None:
        for column, replay in enumerate(own_replays(job)):
            replay.set_router_replay_action(action)
            if routes is not None:
                replay.set_target_indices(routes.ids[:, column].long())

    act(actions.RECORD)
    with torch.no_grad():
        job.loss(job.batches[0])
    verl.replay.clear_global_router_replay_action()
    recorded = [replay.recorded_topk_idx for replay in own_replays(job)]
    assert torch.equal(torch.stack(recorded, dim=1), own[0].ids.long())
    verl.replay.clear_global_indices()
    assert [replay.recorded_topk_idx for replay in own_replays(job)] == [None] * 4
    with perturbed(job.model):
        with npu_replay.replay(job.model, own):
            losses, grads = job.run()
        job.model.zero_grad()
        for tokens, routes, wanted in zip(job.batches, own, losses, strict=True):
            act(actions.REPLAY_FORWARD, routes)
            loss = job.loss(tokens)
            assert loss.item() == wanted
            act(actions.REPLAY_BACKWARD)
            loss.backward()
        act(None)
        assert job.loss(job.batches[0]).item() != losses[0]
    assert same(gradients(job.model), grads)


def test_nothing_is_left_when_a_pass_raises(verl: SimpleNamespace) -> None:
    """Nor of what was set inside it, in the pass around it."""
    job = trainer()
    running = EnginePass(EngineAdapter(job))
    with EnginePass().entered():
        with pytest.raises(MemoryError), running.entered():
            verl.replay.set_global_router_replay_action(verl.actions.RECORD)
            job.loss(job.batches[0])
            raise MemoryError
        assert (current().engine, current().action) == (None, "")
    assert hooks(job.model) == 0


def test_what_is_no_action_is_refused(verl: SimpleNamespace) -> None:
    job = trainer()
    with EnginePass(EngineAdapter(job)).entered():
        with pytest.raises(RouterError, match="no action of a RouterReplay"):
            verl.replay.set_global_router_replay_action(3)
        verl.replay.set_global_router_replay_action(verl.actions.RECORD)
        job.loss(job.batches[0])
        verl.replay.clear_global_router_replay_action()
        assert not current().action


def test_a_pass_in_which_verl_aligns_no_routes_says_so_at_its_end(verl: SimpleNamespace) -> None:
    """verl 0.9.0 doesn't look whether an R3 batch has any; the other ranks wait in the schedule."""
    if not hasattr(verl.utils, "align_r3_router_replay_data"):
        pytest.skip("verl aligns routes from 0.9 on")
    job = trainer()
    tokens = torch.nested.as_nested_tensor(list(job.batches[0]), layout=torch.jagged)
    running = EnginePass(EngineAdapter(job), trains=True)
    with pytest.raises(MicroBatchError, match="this micro-batch has no routes"), running.entered():
        verl.replay.set_global_router_replay_action(verl.actions.REPLAY_FORWARD)
        routes = verl.utils.align_r3_router_replay_data(None, tokens)
        verl.utils.set_router_replay_data(routes, None, job.tf_config, 0)
        finished = job.loss(job.batches[0])
    assert finished.isfinite()


def padded_rows(lengths: tuple[int, ...], rank: dict[str, int], **how: Any) -> list[int]:
    """The token in each row of one rank's routers, -1 for padding, by verl's own padding of a micro-batch."""
    util: Any = importlib.import_module("verl.models.mcore.util")
    pad = getattr(util, "preprocess_bshd_engine", None) or util.preprocess_bshd_no_padding
    every = torch.arange(1, sum(lengths) + 1).split(lengths)
    fed = pad(torch.nested.as_nested_tensor(list(every), layout=torch.jagged), pre_process=True, **how)[0]
    rows = fed.T.reshape(-1) - 1  # Megatron's hidden states are [sequence, batch, hidden]
    part = len(rows) // rank["tp"]
    return rows[rank["tp_rank"] * part :][:part].tolist()  # type: ignore[no-any-return]


def own_rows(lengths: tuple[int, ...], config: Any) -> list[int]:
    jagged = torch.nested.as_nested_tensor([torch.zeros(length) for length in lengths], layout=torch.jagged)
    return tensors.BatchForm.of(jagged, None, config).layout().rows.tolist()


def test_the_layers_of_a_config_are_looked_for_once(
    verl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch has a layout, and the search for a pattern takes up to 0.1 s."""
    search = Mock(wraps=hybrid.pattern_of)
    monkeypatch.setattr(hybrid, "pattern_of", search)
    config = megatron_model.config()
    assert own_rows((7,), config) == own_rows((7,), config)
    assert tensors.routed_of(config).num_layers == config.num_layers
    search.assert_called_once_with(config)


@pytest.mark.choice
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_padded_sequence_has_the_rows_of_a_packed_one(
    verl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tp: int, cp: int
) -> None:
    """Of every rank. Several sequences don't, nor one that is padded to a longer one's length."""
    from megatron.core import parallel_state

    util: Any = importlib.import_module("verl.models.mcore.util")
    if cp > 1 and hasattr(util, "preprocess_bshd_no_padding"):
        pytest.skip("verl 0.7 knows no padded sequences under context parallelism")
    single = ((1,), (2,), (7,), (8,), (13,), (31,), (64,), (100,))
    config = megatron_model.config()
    config.sequence_parallel = tp > 1
    differ: list[tuple[int, ...]] = []
    for place in range(tp * cp):
        rank = {"tp": tp, "tp_rank": place % tp, "cp": cp, "cp_rank": place // tp}
        for axis, name in (("tp", "tensor_model_parallel"), ("cp", "context_parallel")):
            monkeypatch.setattr(parallel_state, f"get_{name}_world_size", lambda at=rank[axis]: at)
            monkeypatch.setattr(parallel_state, f"get_{name}_rank", lambda at=rank[f"{axis}_rank"]: at)
        for lengths in single:
            assert own_rows(lengths, config) == padded_rows(lengths, rank), (lengths, rank)
        several = ((3, 5), (8, 8, 8), (16, 64))
        differ += [lengths for lengths in several if own_rows(lengths, config) != padded_rows(lengths, rank)]
        if cp > 1 and "forced_max_seqlen" in inspect.signature(util.preprocess_bshd_engine).parameters:
            assert own_rows((7,), config) != padded_rows((7,), rank, forced_max_seqlen=100)
    assert {*differ} == {*several}


def test_a_padded_micro_batch_with_other_rows_is_an_error(verl: SimpleNamespace) -> None:
    config = megatron_model.config()

    def check(*lengths: int, to_mini_batch: bool = False, **settings: Any) -> None:
        jagged = torch.nested.as_nested_tensor(
            [torch.zeros(length) for length in lengths], layout=torch.jagged
        )
        for name, value in settings.items():
            setattr(config, name, value)
        tensors.BatchForm.of(jagged, None, config).check_padded(to_mini_batch=to_mini_batch)

    check(7)
    for lengths, how, words in (
        ((7, 7), {}, "2 sequences"),
        ((7,), {"to_mini_batch": True}, "pad_bshd_to_minibatch_max=True"),
        ((7,), {"fp8": "hybrid"}, "fp8=hybrid"),
        ((7,), {"fp8": None, "experimental_attention_variant": "dsv4_hybrid"}, "dsv4_hybrid=True"),
    ):
        with pytest.raises(MicroBatchError, match=words):
            check(*lengths, **how)


@pytest.mark.parametrize("ranks", [2, 36])
def test_the_padded_end_of_verls_ulysses_is_no_sequence(ranks: int) -> None:
    """verl pads packed rows as `follow` expects it: at their end, with positions from 0 on."""
    fed = fed_packed(texts())[0]
    pad = importlib.import_module("verl.utils.ulysses").ulysses_pad
    ids, positions, size = pad(fed["input_ids"], fed["position_ids"], sp_size=ranks)
    expected = ulysses_padded(fed["input_ids"], fed["position_ids"], ranks)
    assert all(map(torch.equal, (ids, positions), expected))
    sequences = fed_sequences({"input_ids": ids, "position_ids": positions}, {})
    assert sequences.padded == [False] * 5 + [True] * (size > 1)
