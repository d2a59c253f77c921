"""What verl's own engine, and 0.7's own actor, do with npu_replay in them, on two processes.

Each case asserts on every rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import npu_replay
from case_jobs import Cases, shared_folder, told
from npu_replay import RoutedExperts
from npu_replay.compat.verl import batch_routes, r3_store
from npu_replay.compat.verl.batch_routes import keys_in
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import current
from npu_replay.environment import DELIVERY
from npu_replay.errors import InvalidRoutes, ReplayError
from on_verl import engine_job as job
from on_verl.engine_job import LENGTHS, Actor, LegacyActor, Split, Tiny, prepare
from verl_configs import PADS_TO_MINI_BATCH
from zoo.gpt import VARIANTS
from zoo.gpt_split import EXPERTS
from zoo.outcome import same

__all__ = ["CASES", "prepare"]
CASES = Cases()
case = CASES.named
patched = pytest.MonkeyPatch.context
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BASE: dict[str, dict[str, Any]] = {
    "dp2": {},
    "pp2": {"split": Split(pp=2)},
    "pp2 and a stage of dense layers": {"split": Split(pp=2), "moe": (0, 0, 1, 1)},
    "pp2, two virtual stages and a dense chunk": {"split": Split(pp=2, vp=2), "moe": (0, 1, 1, 1)},
    "tp2 with sequence parallel": {"split": Split(tp=2, etp=2)},
    "cp2": {"split": Split(cp=2)},
    "dynamic micro-batches": {"most": 24},
    "full recompute": {"changes": FULL},
    "ep2": {"split": Split(ep=2)},
    "groups by sigmoid and a bias": {"changes": VARIANTS["groups_sigmoid_bias"]},
    "an aux loss of each sequence": {"changes": VARIANTS["seq_aux_loss"] | FULL},
    "pp2 of padded sequences": {"split": Split(pp=2), "padded": "micro", "micro": 1},
    "tp2 of padded sequences": {"split": Split(tp=2, etp=2), "padded": "micro", "micro": 1},
    "pp2 of a HybridModel": {"split": Split(pp=2), "moe": (0, 1, 1, 1), "pattern": "*-*E*E*E"},
}


# What is expected


def groups(tiny: Tiny) -> list[list[int]]:
    """The samples of each micro-batch of this rank, where their number is fixed."""
    numbers = job.mine(tiny.split)
    return [numbers[at : at + tiny.micro] for at in range(0, len(numbers), tiny.micro)]


def sets(ids: torch.Tensor) -> torch.Tensor:
    """Experts in ascending order: their order within a row says nothing."""
    return ids.long().sort(dim=-1).values


def check_rows(
    shown: Sequence[RoutedExperts],
    routes: Sequence[torch.Tensor],
    tiny: Tiny,
    columns: Sequence[int] | None = None,
) -> None:
    """The witness saw these routes: of every token of this rank, in its row, in its layer.

    Args:
        shown: by micro-batch, what the routers' outputs showed.
        routes: of each sample of this rank, [tokens, layers, topk]; a row of zeros has none.
        columns: the decoder layer of each column; all layers if not given.
    """
    columns = columns or range(len(tiny.moe))
    first = job.mine(tiny.split)[0]
    checked = 0
    for micro_batch, numbers in zip(shown, groups(tiny) * (len(shown) // len(groups(tiny))), strict=True):
        if not micro_batch.layers:
            continue
        here = job.rows(numbers, tiny.split)
        assert len(here) == len(micro_batch)
        wanted = [columns.index(layer) for layer in micro_batch.layers]
        for row, token in enumerate(here):
            if token is None:
                continue
            ids = sets(micro_batch.ids[row])
            route = routes[token[0] - first][token[1]]
            if route.any():
                assert torch.equal(ids, sets(route[wanted])), token
                checked += 1
            else:
                assert bool((ids.diff() > 0).all()), f"{token}: zeros were replayed"
    assert checked or not any(micro_batch.layers for micro_batch in shown)


def moe_layers(tiny: Tiny) -> list[int]:
    return [layer for layer, moe in enumerate(tiny.moe) if moe]


def same_gradients(ours: Any, theirs: Any) -> None:
    assert len(ours.gradients) == len(theirs.gradients) > 0
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        assert any(gradient.any() for gradient in a)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def same_shown(ours: Sequence[RoutedExperts], theirs: Sequence[RoutedExperts]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(sets(a.ids), sets(b.ids))


def nothing_is_on() -> None:
    assert (current().action, current().engine) == ("", None)
    assert not npu_replay.report().open_sessions


def check_told(lines: list[str], mode: str, tiny: Tiny, share: str) -> None:
    """Once, on rank 0."""
    routers = sum(tiny.moe)
    start = f"{mode}: {routers} routers, {routers} replayed, {share} of rows had a route, 2 ranks"
    assert len(lines) == (dist.get_rank() == 0), lines
    assert all(line.startswith(f"[npu_replay] {start}") for line in lines), lines


def begin(**settings: Any) -> Tiny:
    """Parallel state for a case; its settings."""
    return Tiny(**(settings | {"split": job.start(settings.get("split", Split()))}))


def begin_r3(**settings: Any) -> tuple[Tiny, Actor, list[torch.Tensor]]:
    tiny = begin(mode="R3", **settings)
    return tiny, Actor(tiny), job.rollout_routes(tiny)


def plain_of(actor: Any) -> Any:
    """The same actor, of a job without replay."""
    return type(actor)(replace(actor.tiny, mode="disabled"))


def r3_batch(tiny: Any, routes: Sequence[torch.Tensor] | None) -> Any:
    """A batch with a rollout's routes, if given, that can be updated on right away."""
    return r3_batch_of(job.batch(tiny, routes))


def r3_batch_of(data: Any) -> Any:
    data.batch["old_log_probs"] = torch.zeros(len(data), job.RESPONSE)
    return data


def recorded_batch(actor: Any) -> tuple[Any, list[torch.Tensor]]:
    """R2's first pass: the batch with old log-probs and routes, as the trainer has it; and the routes."""
    data = job.batch(actor.tiny)
    data.batch["old_log_probs"], data.batch["routed_experts"] = actor.log_probs(data)
    return data, job.unpadded(data.batch["routed_experts"], data)


# R2 and R3


def _r2(kind: Any, settings: dict[str, Any], *, stays: bool = False) -> Any:
    tiny = begin(mode="R2", **settings)
    actor = kind(tiny)
    plain = plain_of(actor)
    columns = moe_layers(tiny)
    with npu_replay.observe(actor.chunks) as first:
        data, routes = recorded_batch(actor)
    others = job.batch(tiny)
    with npu_replay.record(plain.chunks) as own:
        others.batch["old_log_probs"], none = plain.log_probs(others)
    assert none is None
    assert torch.equal(others.batch["old_log_probs"], data.batch["old_log_probs"])
    shape = (1, 5) if stays else (len(columns), 2)
    assert [tuple(ids.shape) for ids in routes] == [
        (sum(LENGTHS[number]), *shape) for number in job.mine(tiny.split)
    ]
    with job.other_routers(actor.chunks, plain.chunks), told() as lines:
        with npu_replay.observe(actor.chunks) as second:
            metrics = actor.update(data)
        with npu_replay.replay(plain.chunks, own.routes):
            off = plain.update(others)
    assert not [name for name in off if name.startswith("npu_replay/")]
    if stays:
        usable = EngineAdapter.of(actor.engine).routes.usable
        kept = [usable[key] for key in keys_in(data.batch["routed_experts"])] if usable else []
        routes = [sample.ids for sample in kept]
        columns = list(kept[0].layers) if kept else []  # none on a stage of dense layers
    if tiny.most:
        same_shown(first.shown, second.shown)
    else:
        for seen in (first, second):
            check_rows(seen.shown, routes, tiny, columns)
    same_gradients(actor, plain)
    check_told(lines, "R2", tiny, "100%")
    assert set(metrics["npu_replay/rows_without_route"]) == {0.0}
    assert set(metrics["npu_replay/bad_samples"]) == {0.0}
    assert 0.1 < metrics["npu_replay/live_mismatch"][0] <= 1
    assert metrics["npu_replay/seconds"][0] > 0
    nothing_is_on()
    return actor


def _r3(kind: Any, settings: dict[str, Any], prepared: Callable[[Any], Any] | None = None) -> None:
    tiny = begin(mode="R3", **settings)
    actor = kind(tiny)
    routes = job.rollout_routes(tiny)
    data = job.batch(tiny, routes)
    data = prepared(data) if prepared else data
    with told() as lines:
        with npu_replay.observe(actor.chunks) as first:
            data.batch["old_log_probs"], _ = actor.log_probs(data)
        with npu_replay.observe(actor.chunks) as second:
            metrics = actor.update(data)
    for seen in (first, second):
        check_rows(seen.shown, routes, tiny)
    assert not any(metrics["actor/ppo_kl"]), "an unchanged policy under the same routes is the same policy"
    every = torch.cat(job.rollout_routes(Tiny(split=Split(ranks={"dp": 0}, pp=2))))
    missing = 1 - float((every != 0).flatten(1).any(dim=1).double().mean())
    assert metrics["npu_replay/rows_without_route"] == pytest.approx(
        [missing] * len(metrics["npu_replay/rows_without_route"])
    )
    check_told(lines, "R3", tiny, f"{100 - 100 * missing:.2f}%")
    nothing_is_on()


def _lora(kind: Any) -> None:
    """An actor without its adapter is the reference: neither recorded nor replayed, and without routes."""
    for mode in ("R2", "R3"):
        tiny = begin(mode=mode, lora=True)
        actor = kind(tiny)
        routes = job.rollout_routes(tiny)
        with told() as lines:
            log_probs, names = actor.reference(job.batch(tiny, routes))
            wanted, _ = plain_of(actor).reference(job.batch(tiny))
        assert torch.equal(log_probs, wanted)
        assert "routed_experts" not in names
        assert (lines, actor.adapter.off) == ([], 1)
        data = job.batch(tiny, routes if mode == "R3" else None)
        with npu_replay.observe(actor.chunks) as seen:
            _, own = actor.log_probs(data)
        check_rows(seen.shown, routes if mode == "R3" else job.unpadded(own, data), tiny)
        nothing_is_on()


def _r3_by_reference(settings: dict[str, Any]) -> None:
    """Each rank reads its own layers, once, for old log-probs and update."""
    tiny = begin(mode="R3", **settings)
    with job.delivered(tiny) as by_reference:
        _r3(Actor, settings, by_reference)


@contextlib.contextmanager
def lost_on_rank_1() -> Iterator[None]:
    """The first sample that it fetches can't be read there; the other rank has all of its own."""
    fetch = r3_store.fetch_each
    gone = InvalidRoutes("the routes can't be read", expected="a piece", got="none")

    def without_first(references: Any, *how: Any) -> Any:
        return [gone, *fetch(references, *how)[1:]] if references else []

    with patched() as patch:
        if dist.get_rank() == 1:
            patch.setattr(r3_store, "fetch_each", without_first)
        yield


@case("R3 by reference: a sample that one rank can't read")
def _lost() -> None:
    """At first an error on all ranks; then a bad sample on all, and counted, whichever stage or part of the
    sequence lost it. So is one with other tokens."""
    for split in (Split(pp=2), Split(cp=2)):
        tiny, actor, routes = begin_r3(split=split)
        with job.delivered(tiny) as by_reference:
            first, second, third, other = (by_reference(r3_batch(tiny, routes)) for _ in range(4))
            with lost_on_rank_1():
                leave(partial(actor.update, first), "rank 1 can't read the routes of 1 samples", first=0)
            actor.update(second)
            with lost_on_rank_1(), npu_replay.observe(actor.chunks) as seen:
                metrics = actor.update(third)
            check_native(seen.shown, routes, tiny, metrics)
            tokens = other.batch["input_ids"]
            tokens[0] = (tokens[0] % (job.VOCAB - 1) + 1) * other.batch["attention_mask"][0]
            with npu_replay.observe(actor.chunks) as seen:
                metrics = actor.update(other)
            check_native(seen.shown, routes, tiny, metrics)


def check_native(shown: Any, routes: Any, tiny: Tiny, metrics: dict[str, Any]) -> None:
    """The first sample took the routers' own choice on this rank, and is counted."""
    assert set(metrics["npu_replay/bad_samples"]) == {1.0}
    check_rows(shown, [torch.zeros_like(routes[0]), *routes[1:]], tiny)
    with pytest.raises(AssertionError):
        check_rows(shown, routes, tiny)


def _r2_by_reference(settings: dict[str, Any]) -> None:
    """Batches have keys, and ids stay in the ranks that recorded them."""
    with patched() as patch:
        patch.setenv(DELIVERY, "ray")
        # Nothing is elsewhere, for a stage of dense layers neither.
        patch.setattr(batch_routes, "exchange", None)
        actor = _r2(Actor, settings, stays=True)
        adapter = EngineAdapter.of(actor.engine)
        store = adapter.routes
        assert bool(store.nbytes) == any(actor.tiny.moe[layer] for layer in store.layers)
        assert not adapter.microseconds, "an update counts the time of the passes before it once"


@case("R2 by reference: samples that another replica trains on")
def _moved() -> None:
    """Their routes move there, once, for log-probs that are computed again too; a key that nobody knows is an
    error on every rank, as after workers were started anew."""
    actor = Actor(begin(mode="R2"))
    with patched() as patch, job.other_routers(actor.chunks):
        patch.setenv(DELIVERY, "ray")
        with npu_replay.observe(actor.chunks) as seen:
            data, _ = recorded_batch(actor)
        wanted = elsewhere(seen.shown)
        there = elsewhere(data)
        exchange = Mock(wraps=batch_routes.exchange)
        patch.setattr(batch_routes, "exchange", exchange)
        again = job.log_prob_batch(there)
        again["routed_experts"] = job.update_batch(there)["routed_experts"]
        for run in (
            lambda: actor.output(actor.worker.compute_log_prob(again)),
            lambda: actor.update(there),
        ):
            with npu_replay.observe(actor.chunks) as second, job.other_routers(actor.chunks):
                run()
            same_shown(wanted, second.shown)
        assert [len(call.args[1]) for call in exchange.call_args_list] == [len(data)]
        kept = EngineAdapter.of(actor.engine).routes
        kept._held.clear()  # as on a rank that was started anew
        with pytest.raises(ReplayError, match=r"routes that can't be used|so does this one"):
            actor.update(data)
    nothing_is_on()


def elsewhere(mine: Any) -> Any:
    """What the other of two ranks has."""
    both: list[Any] = [None, None]
    dist.all_gather_object(both, mine)
    return both[1 - dist.get_rank()]


for _name, _settings in BASE.items():
    CASES[f"R3 by reference: {_name}"] = partial(_r3_by_reference, _settings)
    CASES[f"R2 by reference: {_name}"] = partial(_r2_by_reference, _settings)
    for _kind, _of in ((Actor, ""), (LegacyActor, "0.7's actor, ")):
        CASES[f"{_of}R2: {_name}"] = partial(_r2, _kind, _settings)
        CASES[f"{_of}R3: {_name}"] = partial(_r3, _kind, _settings)
        CASES[f"{_of}without its adapter"] = partial(_lora, _kind)


@case("padded sequences that have other rows")
def _other_rows() -> None:
    """Two a micro-batch; and one padded to the longest of the mini-batch, where a release does that."""
    ways = [{"padded": "micro", "micro": 2}, {"padded": "mini", "micro": 1}]
    for how in ways[: 1 + PADS_TO_MINI_BATCH]:
        tiny, actor, routes = begin_r3(**how)
        update = partial(actor.update, r3_batch(tiny, routes))
        leave(update, "the rows of this padded micro-batch aren't those of a packed one", first=0)
        assert not actor.gradients
        recorder = Actor(replace(tiny, mode="R2"))
        leave(partial(recorded_batch, recorder), "the rows of this padded micro-batch", first=0)


@case("more experts than a byte holds")
def _wide() -> None:
    """T19: up to 0.9.0 verl narrows to uint8 in the engine itself."""
    tiny = begin(mode="R2", moe=(0, 0, 0, 1), changes={"num_moe_experts": 300})
    actor = Actor(tiny)
    data, routes = recorded_batch(actor)
    assert max(int(ids.max()) for ids in routes) > 255
    with job.other_routers(actor.chunks), npu_replay.observe(actor.chunks) as seen:
        actor.update(data)
    check_rows(seen.shown, routes, tiny, moe_layers(tiny))


@case("a sample that was rejected")
def _rejected() -> None:
    """verl 0.9 replays no row of a sample without a response that counts; that is no bad sample."""
    tiny, actor, routes = begin_r3()
    data = r3_batch(tiny, routes)
    data.batch["response_mask"][1] = 0
    with npu_replay.observe(actor.chunks) as seen:
        metrics = actor.update(data)
    assert set(metrics["npu_replay/bad_samples"]) == {0.0}
    check_rows(seen.shown, [routes[0], torch.zeros_like(routes[1]), *routes[2:]], tiny)
    with pytest.raises(AssertionError):
        check_rows(seen.shown, routes, tiny)


# What must stay as it is


@case("two mini-batches and two epochs")
def _epochs() -> None:
    """Each update replays its own samples' routes, over optimizer steps; figures on every second one."""
    tiny = begin(mode="R2", micro=1)
    actor = Actor(tiny)
    data, routes = recorded_batch(actor)
    with patched() as patch, job.other_routers(actor.chunks), told() as lines:
        patch.setenv("NPU_REPLAY_METRICS_EVERY", "2")
        with npu_replay.observe(actor.chunks) as seen:
            metrics = actor.update(data, mini_batch_size=4, epochs=2)
    assert len(seen.shown) == 2 * len(groups(tiny))
    check_rows(seen.shown, routes, tiny)
    assert len(actor.gradients) == 4
    check_told(lines, "R2", tiny, "100%")
    assert len(metrics["npu_replay/seconds"]) == 4 * 2, "of each update, on each rank"
    assert len(metrics["npu_replay/live_mismatch"]) == 2 * 2


@case("reference and critic")
def _others() -> None:
    """T26: neither is replayed, before, while or after the actor is."""
    tiny, actor, routes = begin_r3()
    actor.worker.ref = job.training_worker(replace(tiny, mode="disabled", forward_only=True))
    passes = [(actor.worker.ref, actor.worker.compute_ref_log_prob, "log_probs")]
    if not job.RELEASE.startswith("0.7."):  # its critic's forward is called with an argument it doesn't have
        critic = job.training_worker(replace(tiny, value=True))  # whose mode is copied from the actor's
        critic.set_loss_fn(lambda model_output, **_: (model_output["values"].values().square().mean(), {}))
        passes.append((critic, critic.infer_batch, "values"))
    data = job.batch(tiny, routes)

    def asked() -> list[torch.Tensor]:
        outputs = []
        for worker, run, name in passes:
            with npu_replay.observe(worker.engine.module) as seen, told() as lines:
                outputs.append(run(job.log_prob_batch(data))[name].values())
            outputs += [micro_batch.ids for micro_batch in seen.shown]
            assert lines == []
        return outputs

    before = asked()
    data.batch["old_log_probs"], _ = actor.log_probs(data)
    between = asked()
    actor.update(data)
    for after in (between, asked()):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if len(passes) == 2:
        critic.train_mini_batch(job.update_batch(data))
        assert len(critic.engine.gradients) == 1
    nothing_is_on()


@case("routes in files")
def _files() -> None:
    """record_file writes what one job records, replay_file gives it to another; mini-batches too."""
    folder = shared_folder()
    tiny = begin(mode="R2", split=Split(pp=2), files={"record_file": folder})
    _, routes = recorded_batch(Actor(tiny))
    dist.barrier()
    again = replace(tiny, mode="R3", files={"replay_file": folder}, micro=1)
    other = Actor(again)
    batch = job.batch(tiny)
    with job.other_routers(other.chunks):
        with npu_replay.observe(other.chunks) as first:
            batch.batch["old_log_probs"], _ = other.log_probs(batch)
        with npu_replay.observe(other.chunks) as second:
            other.update(batch, mini_batch_size=4)
    for ids in routes:
        ids[-1] = 0  # verl's R3 leaves the last token to the router: nothing comes after it
    for seen in (first, second):
        check_rows(seen.shown, routes, again)
    nothing_is_on()


# What goes wrong


def leave(run: Callable[[], Any], words: str, *, first: int = 1) -> None:
    """Both ranks leave within seconds: the one that found it with all it knows, the other with one line."""
    started = time.monotonic()
    with pytest.raises(ReplayError) as raised:
        run()
    assert time.monotonic() - started < 20
    text = str(raised.value)
    assert text.startswith("[npu_replay]")
    assert words in text, text
    if dist.get_rank() == first:
        assert "Expected" in text or "Usual cause" in text, text
    else:
        assert f"rank {first} stopped" in text
        assert "\n" not in text
    nothing_is_on()


def spoiled(kind: str, routes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """On the last rank the first sample's routes are bad; all of them where it is a matter of shape."""
    copies = [ids.clone().to(torch.int16) for ids in routes]
    if dist.get_rank() < dist.get_world_size() - 1:
        return copies
    if kind == "number of layers":
        return [torch.cat([ids, ids[:, :1]], dim=1) for ids in copies]
    copies[0][1, 0] = torch.tensor([EXPERTS + 3, 1] if kind == "out of range" else [5, 5])
    return copies


def _weights(actor: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in actor.chunks[0].parameters()]


@case("one rank has bad routes in the first step")
def _bad_first() -> None:
    """All leave together, before the optimizer steps; with good routes the next pass is right."""
    for split in (Split(), Split(pp=2)):
        tiny, actor, routes = begin_r3(split=split)
        weights = _weights(actor)
        for problem in ("out of range", "expert twice", "number of layers"):
            leave(partial(actor.update, r3_batch(tiny, spoiled(problem, routes))), problem)
            assert actor.gradients == [], "no step was made"
            assert same(_weights(actor), weights)
        with npu_replay.observe(actor.chunks) as seen:
            actor.update(r3_batch(tiny, routes))
        check_rows(seen.shown, routes, tiny)


@case("one rank has routes of another length")
def _bad_length() -> None:
    """Found in verl's forward step, where its other ranks wait for it."""
    tiny, actor, routes = begin_r3()
    data = r3_batch(tiny, routes)
    update = job.update_batch(data)
    if dist.get_rank() == 1:
        each = list(update["routed_experts"].unbind())
        each[0] = each[0][:-3]
        update["routed_experts"] = torch.nested.as_nested_tensor(each, layout=torch.jagged)
    leave(lambda: actor.worker.update_actor(update), "number of tokens")
    with npu_replay.observe(actor.chunks) as seen:
        actor.update(data)
    check_rows(seen.shown, routes, tiny)


@case("bad samples after the first step")
def _bad_later() -> None:
    """One is counted once, also where the last stage alone has routers, in two chunks; two of eight are an
    error on all ranks, unless the user allows so many. The last row, which verl leaves out, may hold
    anything."""
    for settings in ({"split": Split(pp=2, vp=2), "moe": (0, 1, 0, 1)}, {}):
        tiny, actor, routes = begin_r3(**settings)
        here = tiny.split.pp == 2 or dist.get_rank() == 1

        def updated(bad: int) -> None:
            copies = [ids.to(torch.int16) for ids in routes]  # noqa: B023
            for number, ids in enumerate(copies):
                ids[-1, 1] = EXPERTS + 3
                if number < bad * here:  # noqa: B023
                    ids[1, 1] = torch.tensor([EXPERTS + 3, 1])
            with npu_replay.observe(actor.chunks) as seen:  # noqa: B023
                metrics = actor.update(r3_batch(tiny, copies))  # noqa: B023
            assert set(metrics["npu_replay/bad_samples"]) == {float(bad)}
            left = [ids if n >= bad * here else torch.zeros_like(ids) for n, ids in enumerate(routes)]  # noqa: B023
            check_rows(seen.shown, left, tiny)  # noqa: B023
            if bad * here and any(micro_batch.layers for micro_batch in seen.shown):  # noqa: B023
                with pytest.raises(AssertionError):
                    check_rows(seen.shown, routes, tiny)  # noqa: B023

        updated(0)
        updated(1)
    steps = len(actor.gradients)
    leave(partial(updated, 2), "2 of 8 samples have routes that can't be used", first=0)
    assert len(actor.gradients) == steps
    with patched() as patch:
        patch.setenv("NPU_REPLAY_BAD_SAMPLES", "0.25")
        EngineAdapter.of(actor.engine).met = False  # as an engine that is started with it
        updated(2)


@case("settings, and routes far from the routers' own choice")
def _far() -> None:
    """Ranks that decide by different numbers would part: one is told that they differ, before the pass.
    Routes of other samples, or in other rows than the tokens, are told in the first update."""
    tiny, actor, routes = begin_r3()
    update = partial(actor.update, r3_batch(tiny, routes))
    share = "NPU_REPLAY_BAD_SAMPLES"
    least = "NPU_REPLAY_MIN_OVERLAP"
    differs = "a variable differs between the ranks"
    for value, words, first in (("0.25", differs, 0), ("few", f"{share} is a share", 1)):
        with patched() as patch:
            if dist.get_rank() == 1:
                patch.setenv(share, value)
            leave(update, words, first=first)
    with patched() as patch:
        patch.setattr("npu_replay.sessions.own_choice.RUN", 8)  # this job has fewer than 64 rows a rank
        patch.delenv(least)
        leave(update, "far from what the routers would choose for these tokens", first=0)
        patch.setenv(least, "much")
        leave(update, f"{least} is a share of the experts", first=0)
        assert not actor.gradients
        patch.setenv(least, "0")
        update()
        patch.delenv(least)
        update()  # not the first any more


WHERE_ONE_RANK_FAILS = (
    (
        *(Split(pp=2), ""),
        {
            "npu_replay.compat.verl.engine_pass.StepRecording": "this rank can't record|rank 1 stopped",
            "npu_replay.parallel.parallel_layout.ParallelLayout.chunk_layers": (
                "rank 1: .*this rank can't gather its layers"
            ),
        },
    ),
    (
        *(Split(), "ray"),
        dict.fromkeys(
            ("npu_replay.compat.verl.found_routes.keys_in", "npu_replay.parallel.collect._room"),
            "never thought of|so does this one",
        ),
    ),
)


@case("one rank fails in a way that nobody has thought of")
def _unthought() -> None:
    """Where it opens a pass, where pipeline stages gather, where a sample's routes are looked for, or taken
    from another replica: the others don't wait for it."""

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("never thought of")

    for split, delivery, places in WHERE_ONE_RANK_FAILS:
        actor = Actor(begin(mode="R2", split=split))
        with patched() as patch:
            patch.setenv(DELIVERY, delivery)
            run = partial(recorded_batch, actor)
            if delivery:
                run = partial(actor.update, elsewhere(run()[0]))
            for place, words in places.items():
                with patched() as breaking, pytest.raises(ReplayError, match=words):
                    if dist.get_rank() == 1:
                        breaking.setattr(place, fails)
                    run()
                nothing_is_on()
            run()
    nothing_is_on()


@case("routes are missing")
def _missing_routes() -> None:
    """T20: R2 without a record, R3 without a rollout's routes: an error, and nothing of an earlier pass."""
    for mode in ("R2", "R3"):
        tiny = begin(mode=mode)
        actor = Actor(tiny)
        actor.update(r3_batch(tiny, job.rollout_routes(tiny)))
        with pytest.raises(RuntimeError, match=r"no routes|routed_experts"):
            actor.update(r3_batch(tiny, None))
        nothing_is_on()


@case("a worker that marks no batch")
def _unmarked() -> None:
    """Such as a copy of verl's in another package, which npu_replay doesn't know. Its update is refused,
    unless it says that it is not to be replayed."""
    actor = Actor(tiny := begin(mode="R2"))
    update = job.update_batch(r3_batch(tiny, None))
    actor.worker.enable_routing_replay = False
    with pytest.raises(ReplayError, match="this update would not replay"):
        actor.worker.update_actor(update.clone())
    assert not actor.gradients
    job.tu.assign_non_tensor_data(update, "enable_routing_replay", False)
    metrics = dict(actor.output(actor.worker.update_actor(update))["metrics"])
    assert len(actor.gradients) == 1
    assert not [name for name in metrics if name.startswith("npu_replay/")]
    nothing_is_on()
