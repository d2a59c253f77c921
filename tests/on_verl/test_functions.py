"""verl's own functions, unmodified, on the Megatron-core that is on the path: record, replay, backward."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import jobs
import npu_replay
from megatron_cases import perturbed, routers
from npu_replay import RoutedExperts
from npu_replay.compat.megatron_backports import router_init, router_methods
from npu_replay.compat.verl.actions import switch
from npu_replay.demo import megatron_model
from npu_replay.errors import InvalidRoutes, ReplayError
from verl_loop import (
    LENGTHS,
    Job,
    Verl,
    backward_sum,
    batches,
    compare_with_the_core,
    core_replay,
    core_routes,
    packed,
)

pytestmark = [pytest.mark.megatron]

CASES = (
    "softmax_after_topk",
    "softmax_before_topk",
    "sigmoid_bias_scaling",
    "groups_softmax",
    "groups_sigmoid_bias",
    "aux_loss",
    "seq_aux_loss",
    "capacity_probs",
    "capacity_padded",
    "dense_first",
)


@pytest.fixture(scope="module", autouse=True)
def lent() -> Iterator[None]:
    with npu_replay.compat.cpu.lend():
        megatron_model.start()
        yield


@pytest.fixture(autouse=True)
def no_action() -> Iterator[None]:
    """What a failed test has left open."""
    yield
    switch._abandon()
    switch.clear()


@pytest.fixture(scope="module")
def verl() -> Iterator[Verl]:
    found = Verl()
    found.patch.apply_router_replay_patch()
    yield found
    router_init._patches.undo()  # other tests' routers have Megatron's
    router_init.install()


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("variant", CASES)
def test_record_replay_and_backward_through_verls_functions(
    verl: Verl, variant: str, recompute: str | None
) -> None:
    """Ids, losses and gradients equal npu_replay's own blocks, with other router weights in the replay."""
    compare_with_the_core(verl, Job(variant, recompute), batches())


def test_no_warning_says_that_an_npu_has_no_replay() -> None:
    found = jobs.run("on_verl.quiet_worker:main", fresh=True)
    assert not [one for one in found["said"] if "not support router replay" in one]
    assert not [one for one in found["filters"] if "router replay" in one]


def test_ids_above_255_survive_the_way_through_verl(verl: Verl) -> None:
    """T19: 0.7 and 0.8 narrow to uint8 in the engine itself."""
    job, batch = (
        Job("softmax_after_topk", None, num_moe_experts=300, moe_router_topk=4, num_layers=2),
        batches(),
    )
    own = core_routes(job, batch)
    routes = verl.record(batch, job.forward, job.config, job.model)
    ids = torch.cat([one.ids for one in own]).long()
    assert int(ids.max()) > 255
    assert torch.equal(packed(routes, verl).long(), ids)


def test_recorded_routes_have_the_type_that_this_verl_carries(verl: Verl) -> None:
    """A fork's own merging may count on it: its bytes are sent, and read as that type again."""
    job, batch = Job("softmax_after_topk", None), batches()
    own = "torch.int16" in Path(verl.utils.__file__).read_text()  # of 0.9 on, whatever the number of experts
    routes = verl.record(batch, job.forward, job.config, job.model)
    assert routes.dtype == (torch.int16 if own else torch.uint8)


def test_routes_of_all_layers_find_their_routers(verl: Verl) -> None:
    """T2, T3: an engine reports dense layers too; they are dropped by label."""
    job, batch = Job("dense_first", None), batches()
    own = core_routes(job, batch)
    routes = verl.record(batch, job.forward, job.config, job.model)
    whole = _with_dense_column(routes)
    with perturbed(job.model):
        wanted, _ = core_replay(job, batch, own, backward_sum)
        losses = verl.replayed(batch, whole, job.forward, job.config, job.model, backward=backward_sum)
    assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]


def _with_dense_column(routes: torch.Tensor) -> torch.Tensor:
    def widened(one: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(one[..., :1, :]), one], dim=-2)

    if routes.is_nested:
        return torch.nested.as_nested_tensor([widened(one) for one in routes.unbind()], layout=torch.jagged)
    return widened(routes)


def test_experts_in_a_dense_layers_column_are_refused(verl: Verl) -> None:
    """The labels have shifted: each layer would replay its neighbour's routes, and all ids look right."""
    job, batch = Job("dense_first", None), batches()
    routes = verl.record(batch, job.forward, job.config, job.model)
    each = [one.roll(1, dims=-2) for one in _with_dense_column(routes).unbind()]
    jagged = routes.is_nested
    wrong = torch.nested.as_nested_tensor(each, layout=torch.jagged) if jagged else torch.stack(each)
    with pytest.raises(InvalidRoutes, match=r"sample 0 .*, layer 0: a dense layer has experts"):
        verl.replayed(batch, wrong, job.forward, job.config, job.model, backward=backward_sum)


def test_rows_of_zeros_take_the_routers_own_choice(verl: Verl) -> None:
    """T1, T42: a row that the engine never saw is zeros, and would be expert 0 twice."""
    job, batch = Job("softmax_after_topk", None), batches()
    own = core_routes(job, batch)
    routes = verl.record(batch, job.forward, job.config, job.model)
    each = list(routes.unbind())
    gone = [one.clone() for one in each]
    mask = verl.batch(batch[0])[1]
    last = -1 if mask is None else int(mask[0].nonzero()[-1])
    gone[0][last - 1 if mask is not None else -2 :] = 0  # the last two tokens of the first sample
    cut = torch.nested.as_nested_tensor(gone, layout=torch.jagged) if routes.is_nested else torch.stack(gone)
    partly = list(own)
    recorded = torch.ones(len(own[0]), dtype=torch.bool)
    recorded[[LENGTHS[0][0] - 2, LENGTHS[0][0] - 1]] = False
    partly[0] = RoutedExperts(
        ids=own[0].ids, layers=own[0].layers, num_experts=own[0].num_experts, recorded=recorded
    )
    with perturbed(job.model):
        wanted, grads = core_replay(job, batch, partly, backward_sum)
        job.model.zero_grad()
        losses = verl.replayed(batch, cut, job.forward, job.config, job.model, backward=backward_sum)
        assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]
        assert all(
            torch.equal(a, b)
            for a, b in zip(job.grads(), grads, strict=True)
            if a is not None and b is not None
        )


@pytest.mark.parametrize("bad", ["range", "twice", "layers", "length"])
def test_routes_that_do_not_fit_are_refused_by_name(verl: Verl, bad: str) -> None:
    job, batch = Job("softmax_after_topk", None), batches()
    routes = verl.record(batch, job.forward, job.config, job.model)
    each = [one.clone().to(torch.int16) for one in routes.unbind()]
    inside = 2 if routes.is_nested else 4
    if bad == "range":
        each[1][inside, 1] = torch.tensor([900, 1])
    elif bad == "twice":
        each[1][inside, 1] = torch.tensor([3, 3])
    elif bad == "layers":
        each = [one[:, :3] for one in each]
    elif routes.is_nested:
        each[1] = each[1][:-3]
    else:
        each = [one[:, :, :1] for one in each]
    wrong = (
        torch.nested.as_nested_tensor(each, layout=torch.jagged) if routes.is_nested else torch.stack(each)
    )
    words = {"range": "out of range", "twice": "expert twice", "layers": "number of layers"}.get(
        bad, "another"
    )
    with pytest.raises(ReplayError, match=words) as raised:
        verl.replayed(batch, wrong, job.forward, job.config, job.model, backward=backward_sum)
    if bad in ("range", "twice"):
        assert isinstance(raised.value, InvalidRoutes)
        assert "sample 1 of the micro-batch, layer 1" in str(raised.value)


def test_a_thrown_away_model_is_not_replayed_instead(verl: Verl) -> None:
    """T18: the model is built twice, and the first one's routers are registered first."""
    orphan = Job("softmax_after_topk", None, seed=1)
    del orphan
    job, batch = Job("softmax_after_topk", None), batches()
    own = core_routes(job, batch)
    routes = verl.record(batch, job.forward, job.config, job.model)
    assert torch.equal(packed(routes, verl).long(), torch.cat([one.ids for one in own]).long())
    assert len(verl.patch.RouterReplay.router_instances) == 4


def test_a_reference_model_beside_it_is_left_alone(verl: Verl) -> None:
    """T26: two models with the flag; the action means the one that runs."""
    reference = Job("softmax_after_topk", None, seed=1)
    job, batch = Job("softmax_after_topk", None), batches()
    before = [reference.forward(sequences).item() for sequences in batch]
    routes = verl.record(batch, job.forward, job.config, job.model)
    with perturbed(job.model):
        verl.replayed(batch, routes, job.forward, job.config, job.model, backward=backward_sum)
    assert [reference.forward(sequences).item() for sequences in batch] == before


def test_a_second_apply_keeps_the_first_engine(verl: Verl) -> None:
    """NeMo #3687: clearing the registry for another model emptied the live one."""
    job, batch = Job("softmax_after_topk", None), batches()
    own = core_routes(job, batch)
    verl.patch.apply_router_replay_patch()
    routes = verl.record(batch, job.forward, job.config, job.model)
    assert torch.equal(packed(routes, verl).long(), torch.cat([one.ids for one in own]).long())


def test_a_rejected_sample_takes_the_routers_own_choice(verl: Verl) -> None:
    """verl 0.9 replays no row of a sample whose response it has rejected; that is no bad sample."""
    if not hasattr(verl.utils, "build_r3_replay_mask"):
        pytest.skip("this verl masks no rows")
    job, batch = Job("softmax_after_topk", None), batches()
    own = core_routes(job, batch)
    routes = verl.record(batch, job.forward, job.config, job.model)
    masks = []
    for number, sequences in enumerate(batch):
        wanted = torch.tensor([bool(number or row != 1) for row in range(len(sequences))])
        tokens, _ = verl.batch(sequences)
        masks.append(verl.utils.build_r3_replay_mask(tokens, wanted[:, None]))
    recorded = [torch.cat(list(mask.unbind())) for mask in masks]
    partly = [
        RoutedExperts(ids=one.ids, layers=one.layers, num_experts=one.num_experts, recorded=keep)
        for one, keep in zip(own, recorded, strict=True)
    ]
    assert not recorded[0][7:19].any()
    assert recorded[0][:6].all()
    with perturbed(job.model):
        wanted_losses, _ = core_replay(job, batch, partly, backward_sum)
        losses = verl.replayed(
            batch, routes, job.forward, job.config, job.model, backward=backward_sum, masks=masks
        )
    assert [loss.item() for loss in losses] == [loss.item() for loss in wanted_losses]


# Loops that go from router to router, as a fork's or a user's own


def own_replays(job: Job) -> list[Any]:
    return [router.module.router_replay for router in routers(job.model)]


def test_each_router_has_the_replay_that_verl_lists(verl: Verl) -> None:
    job = Job("softmax_after_topk", None)
    listed = verl.replay.router_instances
    assert len(listed) == len(own_replays(job)) == 4
    assert all(one is other for one, other in zip(listed, own_replays(job), strict=True))


def test_what_was_recorded_is_read_off_the_router_until_it_is_cleared(verl: Verl) -> None:
    job, batch = Job("softmax_after_topk", None), batches()[:1]
    (own,) = core_routes(job, batch)
    for one in own_replays(job):
        one.set_router_replay_action(verl.actions.RECORD)
    with torch.no_grad():
        job.forward(batch[0])
    verl.replay.clear_global_router_replay_action()
    found = [one.recorded_topk_idx for one in own_replays(job)]
    assert torch.equal(torch.stack(found, dim=1), own.ids.long())
    assert all(
        a is b or torch.equal(a, b) for a, b in zip(verl.replay.get_recorded_data(), found, strict=True)
    )
    verl.replay.clear_global_indices()
    assert [one.recorded_topk_idx for one in own_replays(job)] == [None] * 4
    assert not npu_replay.report().open_sessions


@pytest.mark.parametrize("of", ["verl", "Megatron"])
def test_a_target_that_is_set_on_a_router_is_replayed(verl: Verl, of: str) -> None:
    """Whichever library's enum says so. Live routes in silence would train on other experts."""
    megatron: Any = importlib.import_module("megatron.core.transformer.moe.router_replay")
    action = (verl.actions if of == "verl" else megatron.RouterReplayAction).REPLAY_FORWARD
    job, batch = Job("softmax_after_topk", None), batches()[:1]
    (own,) = core_routes(job, batch)
    with perturbed(job.model):
        (wanted,), _ = core_replay(job, batch, [own], backward_sum)
        for one, ids in zip(own_replays(job), own.ids.unbind(dim=1), strict=True):
            one.set_router_replay_action(action)
            one.set_target_indices(ids.long())
        loss = job.forward(batch[0])
        assert loss.item() == wanted.item()
        assert loss.item() != _live(job, batch[0], own_replays(job))


def _live(job: Job, sequences: list[torch.Tensor], replays: list[Any]) -> float:
    for one in replays:
        one.clear_router_replay_action()
    return float(job.forward(sequences).item())


def test_megatrons_own_api_reaches_the_same_replays(verl: Verl) -> None:
    """Two APIs in one process; were each to have objects of its own, one of them would act on none."""
    megatron: Any = importlib.import_module("megatron.core.transformer.moe.router_replay")
    theirs, action = megatron.RouterReplay, megatron.RouterReplayAction
    gc.collect()
    job, batch = Job("softmax_after_topk", None), batches()[:1]
    (own,) = core_routes(job, batch)
    mine = own_replays(job)
    theirs.global_router_replay_instances[:] = [  # models of other tests whose time hasn't come
        one for one in theirs.global_router_replay_instances if any(one is other for other in mine)
    ]
    with perturbed(job.model):
        (wanted,), _ = core_replay(job, batch, [own], backward_sum)
        theirs.set_global_router_replay_action(action.REPLAY_FORWARD)
        theirs.set_replay_data([ids.long() for ids in own.ids.unbind(dim=1)])
        assert job.forward(batch[0]).item() == wanted.item()
        theirs.clear_global_router_replay_action()


@pytest.mark.parametrize("action", ["replay_forward", None, 3])
def test_what_is_no_action_is_refused(verl: Verl, action: object) -> None:
    job = Job("softmax_after_topk", None)
    with pytest.raises(ReplayError, match="no action of a RouterReplay"):
        own_replays(job)[0].set_router_replay_action(action)


def test_a_copied_router_has_a_replay_of_its_own(verl: Verl) -> None:
    job = Job("softmax_after_topk", None)
    module = routers(job.model)[0].module
    if any(isinstance(one, torch.distributed.ProcessGroup) for one in vars(module).values()):
        pytest.skip("this Megatron-core's routers hold process groups, which can't be copied")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.router_replay is verl.replay.of(twin)
        assert twin.router_replay is not module.router_replay


def test_after_uninstall_a_router_has_megatrons_again_and_after_install_verls(verl: Verl) -> None:
    job = Job("softmax_after_topk", None)
    module = routers(job.model)[0].module
    own = module.router_replay
    for group in (router_init._patches, router_methods._patches):
        group.undo()
    try:
        left = vars(module).get("router_replay")
        assert left is None or type(left).__module__ == "megatron.core.transformer.moe.router_replay"
    finally:
        npu_replay.install()
    assert module.router_replay is own


@pytest.mark.parametrize("extra", [(), (None,)])
def test_packing_may_return_two_things_or_three(
    verl: Verl, monkeypatch: pytest.MonkeyPatch, extra: tuple[None, ...]
) -> None:
    """T9: it became three, and unpacking two of them failed in every record."""
    job, batch = Job("softmax_after_topk", None), batches()
    names = ("preprocess_thd_engine", "preprocess_thd_no_padding", "preprocess_packed_seqs")
    for name in names:
        if not hasattr(verl.utils, name):
            continue
        native = getattr(verl.utils, name)

        @functools.wraps(native)
        def pack(*args: Any, native: Any = native, **kwargs: Any) -> tuple[Any, ...]:
            return native(*args, **kwargs)[0], None, *extra

        monkeypatch.setattr(verl.utils, name, pack)
    own = core_routes(job, batch)
    routes = verl.record(batch, job.forward, job.config, job.model)
    assert torch.equal(packed(routes, verl).long(), torch.cat([one.ids for one in own]).long())


def test_importing_verl_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as said:
        Verl()
    assert not [one for one in said if "router replay" in str(one.message)]
