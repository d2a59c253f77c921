"""What aux losses and the expert bias count while the routers are given their experts.

Against a count by hand, on every release: tests/matrix/test_routing.py.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.compat.megatron import aux_losses
from npu_replay.errors import ReplayError
from zoo.gpt import MICRO_BATCHES, SIGMOID_BIAS, build, routers, same

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

LOSS = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("pad", [False, True])
def test_a_replay_of_ones_own_record_counts_what_a_run_counts_also_after_a_drop(pad: bool) -> None:
    """0.12's seq_aux_loss counts what is left after the drop by capacity."""
    room = {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": pad}
    trainer = build(LOSS | room)
    untouched = trainer.run("each")
    with npu_replay.record(trainer.model) as recording:
        trainer.run("each")
    before = [set(vars(router.module)) for router in routers(trainer.model)]
    for asked in ("live", "replayed"):
        with npu_replay.replay(trainer.model, recording.routes, aux_loss=asked):  # type: ignore[arg-type]
            assert same(trainer.run("each"), untouched)
    assert [set(vars(router.module)) for router in routers(trainer.model)] == before


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build({}).model
    with pytest.raises(ReplayError, match=r"unknown aux_loss\. Expected 'live' or 'replayed', got 'frozen'"):
        npu_replay.replay(model, [], aux_loss="frozen")  # type: ignore[arg-type]
    monkeypatch.setenv("NPU_REPLAY_AUX_LOSS", "both")
    with pytest.raises(ReplayError, match=r"NPU_REPLAY_AUX_LOSS: .*got both"):
        npu_replay.replay(model, [])


@pytest.mark.slow
def test_the_expert_bias_counts_the_experts_that_tokens_were_sent_to() -> None:
    trainer = build(SIGMOID_BIAS)
    rows = trainer.batches[0].numel()
    ids = torch.tensor([6, 7]).expand(rows, 4, 2)
    routes = RoutedExperts(ids=ids, layers=[0, 1, 2, 3], num_experts=8)
    with npu_replay.replay(trainer.model, [routes] * MICRO_BATCHES, aux_loss="live"):
        trainer.run("each")
    for router in routers(trainer.model):
        assert router.module.local_tokens_per_expert.tolist() == [0] * 6 + [rows * MICRO_BATCHES] * 2


class Counting:
    """A router whose aux loss says whose it is."""

    name = "first"

    def apply_load_balancing_loss(self, activation: Any, load_balancing_loss_func: Any) -> Any:
        return self.name, load_balancing_loss_func.keywords["tokens_per_expert"].tolist()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda router: pickle.loads(pickle.dumps(router))])
def test_a_copy_made_inside_a_block_counts_its_own(how: Any) -> None:
    """What a block binds is bound on the router alone; a copy neither counts for it nor holds it."""
    router = Counting()
    ids = torch.tensor([[0, 1], [0, 1]])
    loss = functools.partial(lambda: 0, tokens_per_expert=torch.tensor([1, 1, 2]))
    handle = aux_losses._Recounted(router, ("apply_load_balancing_loss",), lambda: (ids, ids))
    twin = how(router)
    twin.name = "second"
    call = {"activation": 1, "load_balancing_loss_func": loss}
    assert router.apply_load_balancing_loss(**call) == ("first", [2, 2, 0])
    assert twin.apply_load_balancing_loss(**call) == ("second", [1, 1, 2])
    handle.remove()
    alive = weakref.ref(router)
    del router, handle
    gc.collect()
    assert alive() is None
    assert twin.apply_load_balancing_loss(**call) == ("second", [1, 1, 2])
