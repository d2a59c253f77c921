"""verl's own functions, unmodified, on the Megatron-core that is on the path: record, replay, backward."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_model
import npu_replay
from megatron_cases import perturbed, routers
from npu_replay import RoutedExperts
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.verl.engine_pass import current
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.smoke import megatron_model
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
    current().abandon()
    current().clear()


@pytest.fixture(scope="module")
def verl() -> Iterator[Verl]:
    found = Verl()
    found.patch.apply_router_replay_patch()
    yield found
    router_init._patches.undo()  # other tests' routers have Megatron's
    router_init.install()


class Recorded:
    """A job, and what its routers choose: by npu_replay's own record, and through verl's functions."""

    def __init__(self, verl: Verl, variant: str = "softmax_after_topk", **changes: Any) -> None:
        self.verl, self.job, self.batch = verl, Job(variant, None, **changes), batches()
        self.own = core_routes(self.job, self.batch)
        self.routes = verl.record(self.batch, self.job.forward, self.job.config, self.job.model)

    def check(self) -> torch.Tensor:
        """Both are the same; the ids of all tokens."""
        ids = torch.cat([one.ids for one in self.own]).long()
        assert torch.equal(packed(self.routes, self.verl).long(), ids)
        return ids

    def with_samples(self, each: Sequence[torch.Tensor]) -> torch.Tensor:
        """Routes of these samples, as this verl carries them."""
        if self.routes.is_nested:
            return torch.nested.as_nested_tensor(list(each), layout=torch.jagged)
        return torch.stack(list(each))

    def replayed(self, routes: torch.Tensor, **how: Any) -> list[float]:
        """The losses of an update with these routes."""
        job = self.job
        job.model.zero_grad()
        losses = self.verl.replayed(
            self.batch, routes, job.forward, job.config, job.model, backward=backward_sum, **how
        )
        return [loss.item() for loss in losses]

    def check_replay(self, routes: torch.Tensor, own: list[RoutedExperts], **how: Any) -> None:
        """An update with these routes is npu_replay's own replay of those, with other router weights."""
        with perturbed(self.job.model):
            losses, grads = core_replay(self.job, self.batch, own, backward_sum)
            assert self.replayed(routes, **how) == [loss.item() for loss in losses]
            for a, b in zip(self.job.grads(), grads, strict=True):
                assert a is b or torch.equal(a, b)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("variant", CASES)
def test_record_replay_and_backward_through_verls_functions(
    verl: Verl, variant: str, recompute: str | None
) -> None:
    """Ids, losses and gradients equal npu_replay's own blocks, with other router weights in the replay."""
    compare_with_the_core(verl, Job(variant, recompute), batches())


def test_ids_above_255_survive_the_way_through_verl(verl: Verl) -> None:
    """T19: 0.7 and 0.8 narrow to uint8 in the engine itself."""
    ids = Recorded(verl, num_moe_experts=300, moe_router_topk=4, num_layers=2).check()
    assert int(ids.max()) > 255


def test_recorded_routes_have_the_type_that_this_verl_carries(verl: Verl) -> None:
    """A fork's own merging may count on it: its bytes are sent, and read as that type again."""
    own = "torch.int16" in Path(verl.utils.__file__).read_text()  # of 0.9 on, whatever the number of experts
    assert Recorded(verl).routes.dtype == (torch.int16 if own else torch.uint8)


def test_routes_of_all_layers_find_their_routers(verl: Verl) -> None:
    """T2, T3: an engine reports dense layers too; they are dropped by label."""
    recorded = Recorded(verl, "dense_first")
    recorded.check_replay(recorded.with_samples(_with_dense_column(recorded)), recorded.own)


def _with_dense_column(recorded: Recorded) -> list[torch.Tensor]:
    return [torch.cat([torch.zeros_like(one[:, :1]), one], dim=1) for one in recorded.routes.unbind()]


HYBRID = {"*-*E*E": (3, (1, 2)), "MEM*E-ME": (8, (1, 4, 7))}
"""A HybridModel's pattern: the decoder layers of its Hugging Face config, and those with experts."""


@pytest.fixture(params=HYBRID)
def hybrid(request: pytest.FixtureRequest) -> str:
    if why := hybrid_model.missing(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.mark.parametrize("recompute", [None, "selective_moe"])
def test_a_hybrid_model_is_recorded_and_replayed_through_verls_functions(
    verl: Verl, hybrid: str, recompute: str | None
) -> None:
    compare_with_the_core(verl, Job("softmax_after_topk", recompute, pattern=hybrid), batches())


def test_an_engines_rows_of_all_layers_find_the_routers_of_a_hybrid_model(verl: Verl, hybrid: str) -> None:
    """Its config counts symbols: twice as many layers as an engine, where the pattern is one of blocks."""
    recorded = Recorded(verl, pattern=hybrid)
    count, moe = HYBRID[hybrid]
    assert recorded.own[0].layers == moe
    columns = []
    for one in recorded.routes.unbind():
        columns.append(one.new_zeros(len(one), count, one.shape[-1]))
        columns[-1][:, list(moe)] = one
    recorded.check_replay(recorded.with_samples(columns), recorded.own)


def test_rows_of_another_number_of_layers_than_the_pattern_has_are_refused(verl: Verl, hybrid: str) -> None:
    recorded = Recorded(verl, pattern=hybrid)
    wide = [torch.cat([one, *[one[:, :1]] * 6], dim=1) for one in recorded.routes.unbind()]
    count, moe = HYBRID[hybrid]
    with pytest.raises(ReplayError, match=rf"{count} columns, one a decoder layer, or {len(moe)}"):
        recorded.replayed(recorded.with_samples(wide))


def test_experts_in_a_dense_layers_column_are_refused(verl: Verl) -> None:
    """The labels have shifted: each layer would replay its neighbour's routes, and all ids look right."""
    recorded = Recorded(verl, "dense_first")
    wrong = recorded.with_samples([one.roll(1, dims=1) for one in _with_dense_column(recorded)])
    with pytest.raises(InvalidRoutes, match=r"sample 0 .*, layer 0: a dense layer has experts"):
        recorded.replayed(wrong)


def test_rows_of_zeros_take_the_routers_own_choice(verl: Verl) -> None:
    """T1, T42: a row that the engine never saw is zeros, and would be expert 0 twice."""
    recorded = Recorded(verl)
    each = [one.clone() for one in recorded.routes.unbind()]
    mask = verl.batch(recorded.batch[0])[1]
    end = len(each[0]) if mask is None else int(mask[0].nonzero()[-1]) + 1
    each[0][end - 2 :] = 0  # the last two tokens of the first sample
    keep = torch.ones(len(recorded.own[0]), dtype=torch.bool)
    keep[[LENGTHS[0][0] - 2, LENGTHS[0][0] - 1]] = False
    partly = [_only(recorded.own[0], keep), *recorded.own[1:]]
    recorded.check_replay(recorded.with_samples(each), partly)


def _only(routes: RoutedExperts, keep: torch.Tensor) -> RoutedExperts:
    return RoutedExperts(ids=routes.ids, layers=routes.layers, num_experts=routes.num_experts, recorded=keep)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([900, 1], "out of range"),
        ([3, 3], "expert twice"),
        ("layers", "number of layers"),
        ("length", "another"),
    ],
)
def test_routes_that_do_not_fit_are_refused_by_name(verl: Verl, bad: Any, words: str) -> None:
    recorded = Recorded(verl)
    each = [one.clone().to(torch.int16) for one in recorded.routes.unbind()]
    jagged = recorded.routes.is_nested
    if bad == "layers":
        each = [one[:, :3] for one in each]
    elif bad == "length":
        each = [each[0], each[1][:-3], *each[2:]] if jagged else [one[:, :, :1] for one in each]
    else:
        each[1][2 if jagged else 4, 1] = torch.tensor(bad)
    with pytest.raises(ReplayError, match=words) as raised:
        recorded.replayed(recorded.with_samples(each))
    if isinstance(bad, list):
        assert isinstance(raised.value, InvalidRoutes)
        assert "sample 1 of the micro-batch, layer 1" in str(raised.value)


def test_a_thrown_away_model_is_not_replayed_instead(verl: Verl) -> None:
    """T18: the model is built twice, and the first one's routers are registered first."""
    orphan = Job("softmax_after_topk", None, seed=1)
    del orphan
    recorded = Recorded(verl)
    recorded.check()
    assert len(verl.patch.RouterReplay.router_instances) == len(routers(recorded.job.model)) == 4


def test_a_reference_model_beside_it_is_left_alone(verl: Verl) -> None:
    """T26: two models with the flag; the action means the one that runs."""
    reference = Job("softmax_after_topk", None, seed=1)
    before = [reference.forward(sequences).item() for sequences in batches()]
    recorded = Recorded(verl)
    with perturbed(recorded.job.model):
        recorded.replayed(recorded.routes)
    assert [reference.forward(sequences).item() for sequences in batches()] == before


def test_a_second_apply_keeps_the_first_engine(verl: Verl) -> None:
    """NeMo #3687: clearing the registry for another model emptied the live one."""
    recorded = Recorded(verl)
    verl.patch.apply_router_replay_patch()
    job = recorded.job
    recorded.routes = verl.record(recorded.batch, job.forward, job.config, job.model)
    recorded.check()


def test_a_rejected_sample_takes_the_routers_own_choice(verl: Verl) -> None:
    """verl 0.9 replays no row of a sample whose response it has rejected; that is no bad sample."""
    if not hasattr(verl.utils, "build_r3_replay_mask"):
        pytest.skip("this verl masks no rows")
    recorded, masks = Recorded(verl), []
    for number, sequences in enumerate(recorded.batch):
        wanted = torch.tensor([bool(number or row != 1) for row in range(len(sequences))])
        tokens, _ = verl.batch(sequences)
        masks.append(verl.utils.build_r3_replay_mask(tokens, wanted[:, None]))
    keep = [torch.cat(list(mask.unbind())) for mask in masks]
    assert not keep[0][7:19].any()
    assert keep[0][:6].all()
    partly = [_only(one, rows) for one, rows in zip(recorded.own, keep, strict=True)]
    recorded.check_replay(recorded.routes, partly, masks=masks)


@pytest.mark.parametrize("extra", [(), (None,)])
def test_packing_may_return_two_things_or_three(
    verl: Verl, monkeypatch: pytest.MonkeyPatch, extra: tuple[None, ...]
) -> None:
    """T9: it became three, and unpacking two of them failed in every record."""
    for name in ("preprocess_thd_engine", "preprocess_thd_no_padding", "preprocess_packed_seqs"):
        native = getattr(verl.utils, name, None)
        if native is None:
            continue

        @functools.wraps(native)
        def pack(*args: Any, native: Any = native, **kwargs: Any) -> tuple[Any, ...]:
            return native(*args, **kwargs)[0], None, *extra

        monkeypatch.setattr(verl.utils, name, pack)
    Recorded(verl).check()


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


def test_a_replay_that_is_made_by_hand_belongs_to_no_router(verl: Verl) -> None:
    """As verl's own: it has recorded nothing, is copied, and isn't listed among the routers'."""
    job = Job("softmax_after_topk", None)
    made = verl.replay()
    assert made.recorded_topk_idx is None
    assert made.router_replay_action is None
    assert isinstance(copy.deepcopy(made), verl.replay)
    assert made not in verl.replay.router_instances
    assert len(verl.replay.router_instances) == len(own_replays(job))
    with pytest.raises(ReplayError, match="has no router"):
        made.set_target_indices(torch.zeros(3, 2, dtype=torch.int64))


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
    for group in (router_init._patches, router_init._methods):
        group.undo()
    try:
        left = vars(module).get("router_replay")
        assert left is None or type(left).__module__ == "megatron.core.transformer.moe.router_replay"
    finally:
        npu_replay.install()
    assert module.router_replay is own
