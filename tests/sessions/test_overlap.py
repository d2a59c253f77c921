"""Routes of an engine are held against the routers' own choice before a step: when, where, who is spared."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from judged_rows import RUN, of_engine
from npu_replay import MicroBatchError, ReplayError, RoutedExperts, TokenLayout
from npu_replay.routes.overlap import Judged
from npu_replay.sessions import own_choice
from npu_replay.sessions.weights import weights_moved
from zoo.toys import EXPERTS, HIDDEN, TOPK, ToyModel, ToyRouter, foreign, tokens

FAR = "far from what the routers would choose"


pytestmark = pytest.mark.usefixtures("toy_routers")


def own(model: Any, *inputs: torch.Tensor) -> list[RoutedExperts]:
    """What the model's routers choose, as an engine would have handed it over."""
    with torch.no_grad(), npu_replay.record(model) as recording:
        for batch in inputs:
            model(batch)
    return [of_engine(routes.ids, routes) for routes in recording.routes]


def random(rows: int, layers: tuple[int, ...] = (0, 1), seed: int = 9) -> RoutedExperts:
    return foreign(layers=layers, rows=rows, seed=seed)[0].with_known(from_engine=True)


def flipped(right: RoutedExperts, share: float) -> torch.Tensor:
    """The ids [rows, layers, topk], some of them others than the row has."""
    generator = torch.Generator().manual_seed(1)
    ids = right.ids.long()
    unused = torch.ones(*ids.shape[:2], EXPERTS).scatter(2, ids, 0)
    others = torch.multinomial(unused.flatten(0, 1), TOPK, generator=generator).view(ids.shape)
    return torch.where(torch.rand(ids.shape, generator=generator) < share, others, ids)


def run(model: Any, routes: list[RoutedExperts], *inputs: torch.Tensor, **options: Any) -> dict[str, float]:
    with npu_replay.replay(model, routes, **options) as session:
        for batch in inputs:
            model(batch).sum().backward()
    return session.metrics()


@pytest.mark.parametrize("most", [1, 5 * RUN * TOPK * TOPK, 2**24], ids=["a layer", "two layers", "all"])
def test_what_is_judged_are_the_given_and_the_own_choices_of_rows_with_a_route(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Layers are counted in groups of a bounded size."""
    monkeypatch.setattr(own_choice, "_MOST_PAIRS", most)
    seen: list[Judged] = []
    monkeypatch.setattr(own_choice, "judge", lambda rows, **_: seen.append(rows))
    model = ToyModel(*(ToyRouter(layer) for layer in range(3)))
    rows = 2 * RUN
    recorded = torch.arange(rows) % 3 > 0
    (routes,) = foreign(layers=3, rows=rows, recorded=recorded)
    own_ids: list[torch.Tensor] = []
    for layer in model.layers:  # what it would choose behind the experts that it was given before
        weight = layer.router.weight
        layer.router.register_forward_hook(
            lambda _, args, __, weight=weight: own_ids.append((args[0] @ weight.T).topk(TOPK).indices)
        )
    run(model, [routes.with_known(from_engine=True)], tokens(rows=rows))
    (judged,) = seen
    given_ids = routes.ids[recorded].long()
    chosen = torch.stack(own_ids, dim=1)[recorded]
    assert torch.equal(torch.from_numpy(judged.own).long(), chosen)
    hits = (given_ids[..., None] == chosen[..., None, :]).any(dim=-1).sum(dim=-1)
    assert torch.equal(torch.from_numpy(judged.hits).long(), hits.T)
    loads = [
        [side[:, layer].flatten().bincount(minlength=EXPERTS) for side in (given_ids, chosen)]
        for layer in range(3)
    ]
    assert judged.loads.tolist() == [[side.tolist() for side in sides] for sides in loads]


# Who is judged


def test_an_engines_routes_are_refused_and_those_made_by_hand_get_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ToyModel()
    inputs = tokens(rows=RUN)
    (right,) = own(model, inputs)
    assert run(model, [right], inputs)["overlap"] == 1.0
    with pytest.raises(MicroBatchError, match=rf"(?s)micro-batch 0, .*{FAR}.*min_overlap="):
        run(model, [random(RUN)], inputs)
    by_hand = random(RUN).with_known(from_engine=False)
    assert 0.1 < run(model, [by_hand] * 3, inputs, inputs, inputs)["overlap"] < 0.3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(r"micro-batch 0, .*choose \d\d % .*chance gives [12]\d %.*from_engine=True", warning)
    caplog.clear()
    assert run(model, [right.with_known(from_engine=False)], inputs)["overlap"] == 1.0
    assert "overlap" not in run(model, [by_hand], inputs, min_overlap=0)
    assert "would choose" not in caplog.text
    with pytest.raises(MicroBatchError, match=FAR):
        run(model, [by_hand], inputs, min_overlap=0.5)


def test_a_fingerprint_vouches_for_the_rows_of_a_recording_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Rows made by hand may be moved by some, though their tokens are right."""
    inputs = tokens(rows=RUN)
    by_hand = random(RUN).with_known(from_engine=None)
    layout = npu_replay.TokenLayout.packed([RUN], fingerprints=[7])
    assert run(ToyModel(), [layout.gather([by_hand])], inputs)["overlap"] < 0.3
    assert "RoutedExperts(fingerprint=)" in caplog.text
    caplog.clear()
    named = by_hand.with_known(fingerprint=7)
    assert run(ToyModel(), [layout.gather([named])], inputs)["overlap"] < 0.3
    assert "moved by some" in caplog.text
    recorded = named.with_known(from_engine=False)
    assert "overlap" not in run(ToyModel(), [layout.gather([recorded])], inputs)


def test_the_argument_and_the_variable_switch_it_off_and_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    inputs = tokens(rows=4 * RUN)
    (right,) = own(model, inputs)
    ids = right.ids.clone()
    ids[::4] = random(4 * RUN).ids[::4]  # a coarse rollout: some 0.8 overlap
    coarse = of_engine(ids, right)
    assert 0.7 < run(model, [coarse], inputs)["overlap"] < 0.9
    with pytest.raises(MicroBatchError, match=r"overlap of 0\.\d+ or more"):
        run(model, [coarse], inputs, min_overlap=0.95)
    monkeypatch.setenv("NPU_REPLAY_MIN_OVERLAP", "0.95")
    with pytest.raises(MicroBatchError, match=FAR):
        run(model, [coarse], inputs)
    assert "overlap" not in run(model, [random(4 * RUN)], inputs, min_overlap=0)  # goes before the variable
    monkeypatch.setenv("NPU_REPLAY_MIN_OVERLAP", "0")
    assert "overlap" not in run(model, [random(4 * RUN)], inputs)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, "much", True, float("nan")])
def test_a_limit_that_is_no_share_is_refused(wrong: Any) -> None:
    """That of the variable: tests/test_environment.py."""
    with pytest.raises(ReplayError, match="min_overlap is a share of the experts"):
        npu_replay.replay(ToyModel(), [random(8)], min_overlap=wrong)


# When


def test_below_64_rows_nothing_is_said_and_several_micro_batches_are_taken_together() -> None:
    model = ToyModel()
    few = [tokens(seed, 40) for seed in range(3)]
    assert "overlap" not in run(model, [random(40)], few[0])
    with pytest.raises(MicroBatchError, match=rf"micro-batch 1, .*{FAR}"):
        run(model, [random(40, seed=seed) for seed in range(3)], *few)


def test_rows_are_named_within_the_micro_batch_that_brings_them_to_64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ToyModel()
    inputs = [tokens(rows=40), tokens(1, 3 * RUN)]
    before, right = own(model, *inputs)
    ids = right.ids.clone()
    ids[2 * RUN :] = random(RUN).ids
    with pytest.raises(MicroBatchError, match=rf"micro-batch 1, rows 12. to {3 * RUN - 1}: .*{FAR}"):
        run(model, [before, of_engine(ids, right)], *inputs)
    seen: list[Judged] = []
    monkeypatch.setattr(own_choice, "judge", lambda rows, **_: seen.append(rows))
    run(model, [before, right], *inputs)
    assert seen[0].starts.tolist() == [0, 40], "no shift is looked for across the two"


def test_every_checked_micro_batch_is_judged_and_no_other_costs_a_top_k() -> None:
    model = ToyModel()
    inputs = [tokens(seed, RUN) for seed in range(6)]
    right = own(model, *inputs)
    for number in (1, 2, 4, 5):  # the last one is checked, too
        wrong = [*right[:number], random(RUN), *right[number + 1 :]]
        with pytest.raises(MicroBatchError, match=rf"micro-batch {number}, .*{FAR}"):
            run(model, wrong, *inputs)
    unseen = [*right[:3], random(RUN), *right[4:]]
    with npu_replay.replay(model, unseen) as session:
        for batch in inputs:
            model(batch).sum().backward()
    assert session.metrics()["overlap"] == 1.0
    assert session.counts()["given"] == 5 * RUN * 2 * TOPK
    with pytest.raises(MicroBatchError, match=rf"micro-batch 3, .*{FAR}"):  # a limit of one's own judges all
        run(model, unseen, *inputs, min_overlap=0.5)


def update(model: ToyModel) -> None:
    with torch.no_grad():
        for layer in model.layers:
            layer.router.weight.copy_(torch.randn_like(layer.router.weight))


def test_after_an_update_rows_are_refused_only_for_a_shift_until_the_next_pass_without_grad() -> None:
    """A policy that has moved over epochs may choose any other experts."""
    model = ToyModel()
    inputs = tokens(rows=4 * RUN)
    (right,) = own(model, inputs)
    assert run(model, [right], inputs)["overlap"] == 1.0
    update(model)
    assert run(model, [right], inputs)["overlap"] < 0.4
    with pytest.raises(MicroBatchError, match=FAR):
        run(model, [right], inputs, min_overlap=0.5)  # a limit of the caller's own stays
    (now,) = own(model, inputs)
    with pytest.raises(MicroBatchError, match=r"moved by \+3"):
        run(model, [of_engine(now.ids.roll(-3, 0), now).with_known(made_at=right.made_at)], inputs)
    with pytest.raises(MicroBatchError, match=FAR), torch.no_grad(), npu_replay.replay(model, [right]):
        model(inputs)
    with pytest.raises(MicroBatchError, match=FAR):  # judged by these weights from here on
        run(model, [right], inputs)


def test_routes_of_a_new_rollout_are_judged_by_the_weights_of_now() -> None:
    """They were made after the forward that was judged last, by an engine that has the update."""
    model = ToyModel()
    inputs = tokens(rows=4 * RUN)
    (right,) = own(model, inputs)
    run(model, [right], inputs)
    update(model)
    run(model, [right], inputs)
    with pytest.raises(MicroBatchError, match=FAR):
        run(model, [right.with_known(made_at=math.inf)], inputs)


def test_one_token_repeated_is_right_and_another_ones_rows_are_wrong() -> None:
    """All rows are one, so chance equals the overlap, and one near tie lowers a layer."""
    model = ToyModel(*(ToyRouter(layer) for layer in range(8)))
    inputs = tokens(rows=1).expand(2 * RUN, HIDDEN).contiguous()
    (right,) = own(model, inputs)
    ids = right.ids.clone()
    unused = (torch.arange(EXPERTS)[:, None] != ids[0, 3].long()).all(dim=1).nonzero()[0, 0]
    ids[:, 3, -1] = unused.to(ids.dtype)
    assert run(model, [of_engine(ids, right)], inputs)["overlap"] > 0.8
    chosen = torch.zeros(len(ids), 8, EXPERTS).scatter(2, right.ids.long(), 1)
    others = chosen.topk(TOPK, largest=False).indices  # no expert of their own
    with pytest.raises(MicroBatchError, match=FAR):
        run(model, [of_engine(others, right)], inputs)


# Where


def test_each_chunk_is_judged_by_itself() -> None:
    """The routers of one chunk that are right say nothing for those of another."""
    chunks = [ToyModel(ToyRouter(0)), ToyModel(ToyRouter(1))]
    inputs = [tokens(seed, RUN // 4) for seed in range(5)]
    with npu_replay.record(chunks) as recording:
        for rows in inputs:
            chunks[0](rows), chunks[1](rows)
    others = random(RUN // 4).ids[:, 1]
    wrong = [of_engine(torch.stack([right.ids[:, 0], others], 1), right) for right in recording.routes]
    with pytest.raises(MicroBatchError, match=f"micro-batch 3, chunk 1, layer 1: .*{FAR}"):  # noqa: SIM117
        with npu_replay.replay(chunks, wrong):
            for rows in inputs:
                chunks[0](rows), chunks[1](rows)


def moved(samples: list[RoutedExperts]) -> list[RoutedExperts]:
    """Each by another number of rows."""
    return [of_engine(sample.ids.roll(3 * by, 0), sample) for by, sample in enumerate(samples)]


def stale_tail(samples: list[RoutedExperts]) -> list[RoutedExperts]:
    """Megatron's rows have the sequences of a batch in turn, so a run of one sequence isn't a run of rows."""
    stale = samples[1].ids.clone()
    stale[-RUN:] = random(RUN).ids
    return [samples[0], of_engine(stale, samples[1]), samples[2]]


def several(samples: list[RoutedExperts]) -> list[RoutedExperts]:
    wrong = [of_engine(random(len(sample), seed=at).ids, sample) for at, sample in enumerate(samples)]
    return [samples[0], *wrong[1:5], *samples[5:]]


TAIL = r"sequence 1, tokens 25\d to 31\d: "
BATCH = [3 * RUN, 5 * RUN, 4 * RUN]


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        (TokenLayout.packed([2 * RUN] * 4), moved, r"sequence [123], tokens .*moved by -[369] "),
        (TokenLayout.padded(BATCH, 6 * RUN, order="sequence"), stale_tail, TAIL),
        (TokenLayout.padded(BATCH, 6 * RUN, order="batch"), stale_tail, TAIL),
        (TokenLayout.packed([RUN // 4] * 8), several, r"sequence 1, tokens \d+ to sequence [45], \d+: "),
    ],
    ids=["a shift of its own", "a stale tail", "a stale tail in batch order", "a run of short ones"],
)
def test_the_sequence_that_is_wrong_is_named(layout: TokenLayout, change: Any, words: str) -> None:
    model = ToyModel()
    inputs = tokens(rows=len(layout.rows))
    samples = layout.scatter(own(model, inputs)[0])
    assert run(model, [layout.gather(samples)], inputs)["overlap"] == 1.0
    with pytest.raises(MicroBatchError, match=words):
        run(model, [layout.gather(change(samples))], inputs)


def with_another_layer(right: RoutedExperts, number: int) -> torch.Tensor:
    ids = right.ids.clone()
    ids[:, number] = random(len(ids), (0,)).ids[:, 0]
    return ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            (lambda right, by=by: right.ids.roll(by, 0), rf"moved by \{-by:+} they overlap by 0\.")
            for by in (1, -1, 7, -40)
        ),
        # moved, they would still fit badly
        (lambda right: flipped(right, 0.7).roll(7, 0), r"an overlap of 0.[12]. or more"),
        (lambda right: with_another_layer(right, 4), "micro-batch 0, layer 4: .* an overlap of 0"),
        (lambda right: right.ids.flip(1), r"(?s)all 6 layers: .*reversed"),
        (lambda right: right.ids.roll(1, 1), r"(?s)all 6 layers: .*labels that are moved by some"),
    ],
)
def test_a_shift_that_would_fit_and_a_wrong_layer_are_named(change: Any, words: str) -> None:
    model = ToyModel(*(ToyRouter(layer) for layer in range(6)))
    inputs = tokens(rows=6 * RUN)
    (right,) = own(model, inputs)
    with pytest.raises(MicroBatchError, match=words):
        run(model, [of_engine(change(right), right)], inputs)


@pytest.mark.parametrize(("share", "way"), [(0.0, 0.25), (0.3, 0.18), (0.6, 0.15)])
def test_a_layer_is_held_against_a_quarter_of_the_best_ones_way_from_chance(share: float, way: float) -> None:
    """Where all layers overlap little, as after a coarse rollout, less is asked of each; 0.15 at least."""
    model = ToyModel()
    inputs = tokens(rows=10 * RUN)
    (right,) = own(model, inputs)
    ids = with_another_layer(right.with_rows(flipped(right, share), right.recorded), 1)
    chance = TOPK / EXPERTS
    with pytest.raises(MicroBatchError, match="micro-batch 0, layer 1: ") as caught:
        run(model, [of_engine(ids, right)], inputs)
    (floor,) = re.findall(r"an overlap of (\S+) or more", str(caught.value))
    # Two standard errors below it, of shares that are spread by about a fifth.
    assert float(floor) == pytest.approx(chance + way * (1 - chance) - 2 * 0.2 / (10 * RUN) ** 0.5, abs=0.02)


# Who is spared


def test_a_dead_router_and_routers_with_favourites_are_right() -> None:
    """Chance is nearly 1 there, so nothing can be said, and nothing is."""
    model = ToyModel(*(ToyRouter(layer) for layer in range(3)))
    with torch.no_grad():
        model.layers[1].router.weight.mul_(1e-6)
        model.layers[1].router.weight[:TOPK] += 10
    inputs = tokens(rows=4 * RUN).abs()
    (right,) = own(model, inputs)
    assert len(right.ids[:, 1].unique()) <= TOPK + 1
    assert run(model, [right], inputs)["overlap"] == 1.0


def test_an_update_shows_in_the_parts_that_zero_3_keeps() -> None:
    """DeepSpeed's ZeRO-3 leaves an empty parameter between forwards, and the rank's part beside it."""
    module = nn.Linear(4, 4)
    for parameter in module.parameters():
        parameter.ds_tensor = parameter.data.flatten().clone()
        parameter.data = torch.empty(0)
    assert not weights_moved(module, 0.0, grad=False)
    assert not weights_moved(module, 0.0, grad=True)
    with torch.no_grad():
        module.weight.ds_tensor += 1
    assert weights_moved(module, 0.0, grad=True)


def test_weights_that_are_offloaded_between_calls_count_as_not_moved() -> None:
    """accelerate leaves parameters without data on the device `meta` between calls."""
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(module.weight.detach().to("meta"))
    assert not weights_moved(module, 0.0, grad=False)
    with torch.no_grad():
        module.bias += 1
    assert weights_moved(module, 0.0, grad=True), "what is there is looked at"
    module.bias = nn.Parameter(module.bias.detach().to("meta"))
    assert not weights_moved(module, 0.0, grad=True)
