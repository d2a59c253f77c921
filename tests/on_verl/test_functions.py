"""verl's functions in a pass of an engine, and verl's own elsewhere, on the Megatron-core on the path."""

from __future__ import annotations

import functools
import gc
import importlib
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
from npu_replay.compat.megatron_backports.router_replay import is_idle
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import wrapped
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.sessions.fed_sequences import fed_sequences
from npu_replay.smoke import megatron_model
from sessions.test_follow import packed as fed_packed
from sessions.test_follow import texts
from sessions.test_padded_end import by_hand
from verl_loop import (
    LENGTHS,
    Engine,
    Job,
    Verl,
    backward_sum,
    batches,
    compare_with_the_core,
    core_replay,
    core_routes,
    engine_pass,
    packed,
)

pytestmark = [pytest.mark.megatron]

CASES = (
    *("softmax_after_topk", "softmax_before_topk", "sigmoid_bias_scaling", "groups_softmax"),
    *("groups_sigmoid_bias", "aux_loss", "seq_aux_loss", "capacity_probs", "capacity_padded", "dense_first"),
)


@pytest.fixture(scope="module", autouse=True)
def lent() -> Iterator[None]:
    with npu_replay.compat.cpu.lend():
        megatron_model.start()
        yield


@pytest.fixture(autouse=True)
def unjudged_routes(unjudged: None) -> None:
    """Routers are given other weights for a replay, so that it shows."""


@pytest.fixture(scope="module")
def verl() -> Iterator[Verl]:
    found = Verl()
    found.patch.apply_router_replay_patch()
    yield found
    router_init._patches.undo()  # other tests' routers have Megatron's
    router_init.install()


class Recorded:
    """A job, and what its routers choose: by npu_replay's record, and the same through verl's functions."""

    def __init__(self, verl: Verl, variant: str = "softmax_after_topk", **changes: Any) -> None:
        self.verl, self.job, self.batch = verl, Job(variant, None, **changes), batches()
        self.own = core_routes(self.job, self.batch)
        self.routes = verl.record(self.batch, self.job.forward, self.job.config, self.job.model)
        self.ids = torch.cat([one.ids for one in self.own]).long()
        assert torch.equal(packed(self.routes, verl).long(), self.ids)

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


@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("variant", CASES)
def test_record_replay_and_backward_through_verls_functions(
    verl: Verl, variant: str, recompute: str | None
) -> None:
    """Ids, losses and gradients equal npu_replay's own blocks, with other router weights in the replay."""
    compare_with_the_core(verl, Job(variant, recompute), batches())


def test_ids_above_255_survive_the_way_through_verl(verl: Verl) -> None:
    """T19: 0.7 and 0.8 narrow to uint8 in the engine itself."""
    recorded = Recorded(verl, num_moe_experts=300, moe_router_topk=4, num_layers=2)
    assert int(recorded.ids.max()) > 255


def test_recorded_routes_have_the_type_that_this_verl_carries(verl: Verl) -> None:
    """A fork's own merging may count on it: its bytes are sent, and read as that type again."""
    own = "torch.int16" in Path(verl.utils.__file__).read_text()  # of 0.9 on, whatever the number of experts
    assert Recorded(verl).routes.dtype == (torch.int16 if own else torch.uint8)


def test_routes_of_all_layers_find_their_routers(verl: Verl) -> None:
    """T2, T3: an engine reports dense layers too; they are dropped by label. Experts there mean that the
    labels have shifted: each layer would replay its neighbour's routes, and all ids look right."""
    recorded = Recorded(verl, "dense_first")
    whole = [torch.cat([torch.zeros_like(one[:, :1]), one], dim=1) for one in recorded.routes.unbind()]
    recorded.check_replay(recorded.with_samples(whole), recorded.own)
    wrong = recorded.with_samples([one.roll(1, dims=1) for one in whole])
    with pytest.raises(InvalidRoutes, match=r"sample 0 .*, layer 0: a dense layer has experts"):
        recorded.replayed(wrong)


HYBRID = {"*-*E*E": (3, (1, 2)), "MEM*E-ME": (8, (1, 4, 7)), "*E*E/*E": (2, (0, 1))}
"""A HybridModel's pattern: the decoder layers of its Hugging Face config, and those with experts. Behind the
slash is multi-token prediction, whose router is left to its own choice."""


@pytest.mark.parametrize("pattern", HYBRID)
def test_a_hybrid_model_is_recorded_and_replayed_through_verls_functions(verl: Verl, pattern: str) -> None:
    """Its config counts symbols: twice as many layers as an engine, where the pattern is one of blocks."""
    if why := hybrid_model.missing(pattern):
        pytest.skip(why)
    compare_with_the_core(verl, Job("softmax_after_topk", "selective_moe", pattern=pattern), batches())
    recorded = Recorded(verl, pattern=pattern)
    count, moe = HYBRID[pattern]
    assert recorded.own[0].layers == moe
    columns = []
    for one in recorded.routes.unbind():
        columns.append(one.new_zeros(len(one), count, one.shape[-1]))
        columns[-1][:, list(moe)] = one
    recorded.check_replay(recorded.with_samples(columns), recorded.own)
    wide = [torch.cat([one, *[one[:, :1]] * 6], dim=1) for one in recorded.routes.unbind()]
    with pytest.raises(ReplayError, match=rf"Expected {count}, one a decoder layer, or {len(moe)}"):
        recorded.replayed(recorded.with_samples(wide))


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
    Recorded(verl)


# Without an engine's pass: verl's own functions, and its RouterReplay on each router


def own_replays(job: Job) -> list[Any]:
    found = [getattr(module, "router_replay", None) for module in job.model.modules()]
    return [one for one in found if one is not None]


def test_each_router_has_a_replay_of_verls_and_no_model_that_was_thrown_away(verl: Verl) -> None:
    """T18: verl's own list is never pruned."""
    gone = Job("softmax_after_topk", None, seed=1)
    thrown = own_replays(gone)
    job = Job("softmax_after_topk", None)
    del gone
    gc.collect()
    assert all(type(one) is verl.replay for one in own_replays(job))
    assert all(is_idle(one) for one in own_replays(job)), "nobody has to ask them without an action"
    listed = verl.replay.router_instances
    assert [one for one in listed if any(one is other for other in own_replays(job))] == own_replays(job)
    assert not any(one is other for one in listed for other in thrown)
    compare_with_the_core(verl, job, batches())


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
    verl.replay.clear_global_indices()
    assert [one.recorded_topk_idx for one in own_replays(job)] == [None] * 4


def test_an_action_that_is_set_on_one_model_is_none_of_anothers(verl: Verl) -> None:
    """Where it was the process's, a second model with the flag could run no forward."""
    meant, other = Job("softmax_after_topk", None, seed=1), Job("softmax_after_topk", None, seed=2)
    sequences = batches()[0]
    before = other.forward(sequences).item()
    action = verl.actions.REPLAY_FORWARD
    if hasattr(verl.utils, "set_model_router_replay_action"):
        verl.utils.set_model_router_replay_action(meant.model, action)
    else:
        for one in own_replays(meant):
            one.set_router_replay_action(action)
    assert [one.router_replay_action for one in own_replays(meant)] == [action] * 4
    assert [one.router_replay_action for one in own_replays(other)] == [None] * 4
    assert other.forward(sequences).item() == before


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
        for one in own_replays(job):
            one.clear_router_replay_action()
        assert loss.item() != job.forward(batch[0]).item()


def test_recomputes_take_the_targets_in_their_order(verl: Verl) -> None:
    """verl's queue, as its own patch of the routing reads it: where a backward follows each forward."""
    job, batch = Job("softmax_after_topk", "full"), batches()
    own = core_routes(job, batch)
    with perturbed(job.model):
        losses, grads = core_replay(job, batch, own, backward_sum)
        job.model.zero_grad()
        for sequences, routes, wanted in zip(batch, own, losses, strict=True):
            for one, ids in zip(own_replays(job), routes.ids.unbind(dim=1), strict=True):
                one.set_router_replay_action(verl.actions.REPLAY_FORWARD)
                one.set_target_indices(ids.long())
            loss = job.forward(sequences)
            assert loss.item() == wanted.item()
            for one in own_replays(job):
                one.set_router_replay_action(verl.actions.REPLAY_BACKWARD)
            loss.backward()
    for a, b in zip(job.grads(), grads, strict=True):
        assert a is b or torch.allclose(a, b, atol=1e-7)


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


def test_what_is_no_action_is_refused(verl: Verl) -> None:
    job = Job("softmax_after_topk", None)
    with pytest.raises(ValueError, match="3 is not a valid RouterReplayAction"):
        own_replays(job)[0].set_router_replay_action(3)
    with engine_pass(job.model, job.config), pytest.raises(ReplayError, match="no action of a RouterReplay"):
        verl.replay.set_global_router_replay_action(3)


def test_a_pass_refuses_an_action_that_was_set_before_it(verl: Verl) -> None:
    """It opens what is set inside, and would replay nothing."""
    job = Job("softmax_after_topk", None)
    own_replays(job)[0].set_router_replay_action(verl.actions.RECORD)

    class Runs(Engine):
        def forward_backward_batch(self, data: Any, forward_only: bool = False) -> Any:
            raise AssertionError("it ran")

    Runs.forward_backward_batch = wrapped(Runs.forward_backward_batch, EngineAdapter)  # type: ignore[method-assign]
    with pytest.raises(ReplayError, match="was set before the pass"):
        Runs(job.model, job.config, "R2").forward_backward_batch({})


def test_after_uninstall_a_router_has_megatrons_again_and_after_install_verls(verl: Verl) -> None:
    job = Job("softmax_after_topk", None)
    module = routers(job.model)[0].module
    for group in (router_init._patches, router_init._methods):
        group.undo()
    try:
        left = vars(module).get("router_replay")
        assert left is None or type(left).__module__ == "megatron.core.transformer.moe.router_replay"
    finally:
        npu_replay.install()
    assert type(module.router_replay) is verl.replay


@pytest.mark.parametrize("ranks", [2, 36])
def test_the_padded_end_of_verls_ulysses_is_no_sequence(ranks: int) -> None:
    """verl pads packed rows as `follow` expects it: at their end, with positions from 0 on."""
    fed = fed_packed(texts())[0]
    pad = importlib.import_module("verl.utils.ulysses").ulysses_pad
    ids, positions, size = pad(fed["input_ids"], fed["position_ids"], sp_size=ranks)
    expected = by_hand(fed["input_ids"], fed["position_ids"], ranks)
    assert all(map(torch.equal, (ids, positions), expected))
    found = fed_sequences({"input_ids": ids, "position_ids": positions}, {})
    assert found.padded == [False] * 5 + [True] * (size > 1)
