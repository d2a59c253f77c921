"""What verl's own engine does with npu_replay in it, on two processes; each case asserts on every rank."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu

import npu_replay
from distributed.parallel_model import EXPERTS
from npu_replay import RoutedExperts
from npu_replay.compat.verl.actions import switch
from npu_replay.errors import ReplayError
from on_verl import engine_job as job
from on_verl.engine_job import LENGTHS, Split, Tiny

CASES: dict[str, Callable[[], None]] = {}
BASE: dict[str, dict[str, Any]] = {
    "dp2": {},
    "pp2": {"split": Split(pp=2)},
    "pp2 and a stage of dense layers": {"split": Split(pp=2), "moe": (0, 0, 1, 1)},
    "pp2, two virtual stages and a dense chunk": {
        "split": Split(pp=2, vp=2),
        "moe": (0, 1, 1, 1),
    },
    "tp2 with sequence parallel": {"split": Split(tp=2, etp=2)},
    "cp2": {"split": Split(cp=2)},
    "dynamic micro-batches": {"most": 24},
    "full recompute": {
        "changes": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "ep2": {"split": Split(ep=2)},
}


def case_of(cases: dict[str, Callable[[], None]]) -> Callable[[str], Callable[[Any], Any]]:
    """A decorator that adds a case to these, under a name."""

    def case(name: str) -> Callable[[Any], Any]:
        def add(run: Callable[[], None]) -> Callable[[], None]:
            cases[name] = run
            return run

        return add

    return case


case = case_of(CASES)


# What is told


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The lines for an operator."""
    log, handler = logging.getLogger("npu_replay.job"), _Lines()
    log.addHandler(handler)
    yield handler.lines
    log.removeHandler(handler)


def collected(output: Any, split: Split) -> dict[str, Any]:
    """What the driver gets of this data-parallel rank: from the one rank of it that has an output."""
    mine = None if output is None else {name: tu.get(output, name) for name in output.keys()}  # noqa: SIM118
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (split.ranks["dp"], mine))
    (found,) = (one for rank, one in everyones if rank == split.ranks["dp"] and one is not None)
    return dict(found)


# What is expected


def groups(tiny: Tiny) -> list[list[int]]:
    """The samples of each micro-batch of this rank, where their number is fixed."""
    numbers = job.mine(tiny.split)
    return [numbers[at : at + tiny.micro] for at in range(0, len(numbers), tiny.micro)]


def sets(ids: torch.Tensor) -> torch.Tensor:
    """Experts in ascending order: their order within a row says nothing."""
    return ids.long().sort(dim=-1).values


def check_rows(
    shown: Sequence[RoutedExperts], routes: Sequence[torch.Tensor], columns: Sequence[int], tiny: Tiny
) -> None:
    """The witness saw these routes: of every token of this rank, in its row, in its layer.

    Args:
        shown: by micro-batch, what the routers' outputs showed.
        routes: of each sample of this rank, [tokens, layers, topk]; a row of zeros has none.
        columns: the decoder layer of each column.
    """
    first, checked = job.mine(tiny.split)[0], 0
    for one, numbers in zip(shown, groups(tiny) * (len(shown) // len(groups(tiny))), strict=True):
        if not one.layers:
            continue
        here = job.rows(numbers, tiny.split)
        assert len(here) == len(one)
        wanted = [columns.index(layer) for layer in one.layers]
        for row, token in enumerate(here):
            if token is None or not routes[token[0] - first][token[1]].any():
                continue
            assert torch.equal(sets(one.ids[row]), sets(routes[token[0] - first][token[1]][wanted])), token
            checked += 1
    assert checked or not any(one.layers for one in shown)


def in_rows(tiny: Tiny, routes: Sequence[torch.Tensor]) -> list[RoutedExperts]:
    """Routes of this rank's samples in its routers' rows, for npu_replay's own replay."""
    first, found = job.mine(tiny.split)[0], []
    columns = [layer for layer, moe in enumerate(tiny.moe) if moe]
    for numbers in groups(tiny):
        here = job.rows(numbers, tiny.split)
        ids = torch.zeros(len(here), len(columns), routes[0].shape[-1], dtype=torch.int64)
        recorded = torch.zeros(len(here), dtype=torch.bool)
        for row, token in enumerate(here):
            if token is not None and routes[token[0] - first][token[1]].any():
                ids[row] = routes[token[0] - first][token[1]][columns].long()
                recorded[row] = True
        found.append(RoutedExperts(ids=ids, layers=columns, num_experts=EXPERTS, recorded=recorded))
    return found


def same_gradients(ours: Any, theirs: Any) -> None:
    ours, theirs = ours.actor.engine.gradients, theirs.actor.engine.gradients
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert any(one.any() for one in a)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def nothing_is_on() -> None:
    assert not switch.action
    assert switch.job is None
    assert not npu_replay.report().open_sessions


def begin(**settings: Any) -> Tiny:
    """Parallel state for a case; its settings."""
    return Tiny(**(settings | {"split": job.start(settings.get("split", Split()))}))


def recorded_batch(actor: Any, tiny: Tiny) -> tuple[Any, list[torch.Tensor]]:
    """R2's first pass: the batch with old log-probs and routes, as the trainer has it; and the routes."""
    data = job.batch(tiny.split)
    output = collected(actor.compute_log_prob(job.log_prob_batch(data)), tiny.split)
    routes = output["routed_experts"]
    data.batch["old_log_probs"] = job.as_responses(output["log_probs"], data)
    data.batch["routed_experts"] = routes
    return data, list(routes.unbind())


# R2 and R3


def _r2(settings: dict[str, Any]) -> None:
    tiny = begin(mode="R2", **settings)
    actor, plain = job.actor_worker(tiny), job.actor_worker(replace(tiny, mode="disabled"))
    ours, theirs = actor.actor.engine.module, plain.actor.engine.module
    with npu_replay.observe(ours) as first:
        data, routes = recorded_batch(actor, tiny)
    with npu_replay.record(theirs) as own:
        live = collected(plain.compute_log_prob(job.log_prob_batch(job.batch(tiny.split))), tiny.split)
    assert torch.equal(job.as_responses(live["log_probs"], data), data.batch["old_log_probs"])
    columns = [layer for layer, moe in enumerate(tiny.moe) if moe]
    assert [tuple(one.shape) for one in routes] == [
        (sum(LENGTHS[number]), len(columns), 2) for number in job.mine(tiny.split)
    ]
    if not tiny.most:
        check_rows(first.shown, routes, columns, tiny)
    with job.other_routers(ours, theirs), told() as lines:
        with npu_replay.observe(ours) as second:
            output = actor.update_actor(job.update_batch(data, tiny))
        with npu_replay.replay(theirs, own.routes):
            plain.update_actor(job.update_batch(data, tiny))
    if not tiny.most:
        check_rows(second.shown, routes, columns, tiny)
    elif tiny.split.tp * tiny.split.cp == 1:
        for a, b in zip(first.shown, second.shown, strict=True):
            assert torch.equal(sets(a.ids), sets(b.ids))
    same_gradients(actor, plain)
    check_told(lines, "R2", len(columns), "100%")
    metrics = collected(output, tiny.split)["metrics"]
    assert set(metrics["npu_replay/rows_without_route"]) == {0.0}
    assert set(metrics["npu_replay/bad_samples"]) == {0.0}
    assert 0.1 < metrics["npu_replay/live_mismatch"][0] <= 1
    assert metrics["npu_replay/seconds"][0] > 0
    nothing_is_on()


def check_told(lines: list[str], mode: str, routers: int, share: str) -> None:
    """Once, on rank 0."""
    if dist.get_rank():
        assert lines == []
        return
    (line,) = lines
    start = (
        f"[npu_replay] {mode}: {routers} routers, {routers} replayed, {share} of rows had a route, 2 ranks"
    )
    assert line.startswith(start), line


def _r3(settings: dict[str, Any]) -> None:
    tiny = begin(mode="R3", **settings)
    actor, plain = job.actor_worker(tiny), job.actor_worker(replace(tiny, mode="disabled"))
    ours, theirs = actor.actor.engine.module, plain.actor.engine.module
    routes = job.rollout_routes(tiny)
    rows = in_rows(tiny, routes)
    data = job.batch(tiny.split, routes)
    columns = range(len(tiny.moe))
    with told() as lines:
        with npu_replay.observe(ours) as first:
            old = collected(actor.compute_log_prob(job.log_prob_batch(data)), tiny.split)
        check_rows(first.shown, routes, columns, tiny)
        with npu_replay.replay(theirs, rows):
            wanted = collected(plain.compute_log_prob(job.log_prob_batch(data)), tiny.split)
        torch.testing.assert_close(old["log_probs"].values(), wanted["log_probs"].values())
        data.batch["old_log_probs"] = job.as_responses(old["log_probs"], data)
        with npu_replay.observe(ours) as second:
            output = actor.update_actor(job.update_batch(data, tiny))
        check_rows(second.shown, routes, columns, tiny)
        with npu_replay.replay(theirs, rows):
            plain.update_actor(job.update_batch(data, tiny))
    same_gradients(actor, plain)
    metrics = collected(output, tiny.split)["metrics"]
    assert metrics["actor/ppo_kl"][0] == 0.0, "an unchanged policy under the same routes is the same policy"
    missing, total = _missing()
    without = metrics["npu_replay/rows_without_route"]
    assert all(abs(one - missing / total) < 1e-9 for one in without), (without, missing / total)
    check_told(lines, "R3", sum(tiny.moe), f"{100 - 100 * missing / total:.2f}%")
    nothing_is_on()


def _missing() -> tuple[int, int]:
    """Tokens of all samples that the rollout engine has no route of, and all tokens."""
    whole = Tiny(split=Split(ranks={"dp": 0}, pp=2))
    routes = job.rollout_routes(whole)
    flags = torch.cat([(one != 0).flatten(1).any(dim=1) for one in routes])
    return int((~flags).sum()), len(flags)


for _name, _settings in BASE.items():
    CASES[f"R2: {_name}"] = lambda settings=_settings: _r2(settings)  # type: ignore[misc]
    if "most" not in _settings:
        CASES[f"R3: {_name}"] = lambda settings=_settings: _r3(settings)  # type: ignore[misc]


# What must stay as it is


@case("two mini-batches and two epochs")
def _epochs() -> None:
    """Each update replays its own samples' routes, over optimizer steps; figures on every second one."""
    tiny = begin(mode="R2", micro=1)
    actor = job.actor_worker(tiny)
    data, routes = recorded_batch(actor, tiny)
    os.environ["NPU_REPLAY_METRICS_EVERY"] = "2"
    module = actor.actor.engine.module
    with job.other_routers(module), told() as lines, npu_replay.observe(module) as seen:
        output = actor.update_actor(job.update_batch(data, tiny, mini_batch_size=4, epochs=2))
    del os.environ["NPU_REPLAY_METRICS_EVERY"]
    assert len(seen.shown) == 2 * len(groups(tiny))
    check_rows(seen.shown, routes, range(len(tiny.moe)), tiny)
    assert len(actor.actor.engine.gradients) == 4
    check_told(lines, "R2", 4, "100%")
    metrics = collected(output, tiny.split)["metrics"]
    assert len(metrics["npu_replay/seconds"]) == 4 * 2, "of each update, on each rank"
    assert len(metrics["npu_replay/live_mismatch"]) == 2 * 2


@case("reference and critic")
def _others() -> None:
    """T26: neither is replayed, before, while or after the actor is."""
    tiny = begin(mode="R3")
    actor = job.actor_worker(tiny)
    actor.ref = job.training_worker(replace(tiny, mode="disabled", forward_only=True))
    # The forward of 0.7's critic is called with an argument that it doesn't have.
    critics = (
        []
        if job.RELEASE.startswith("0.7.")
        else [job.training_worker(replace(tiny, mode="disabled", value=True))]
    )
    routes = job.rollout_routes(tiny)
    data = job.batch(tiny.split, routes)

    def passes() -> tuple[list[RoutedExperts], list[torch.Tensor]]:
        with npu_replay.observe(actor.ref.engine.module) as ref, told() as lines:
            output = actor.compute_ref_log_prob(job.log_prob_batch(data))
        shown, found = list(ref.shown), [output["log_probs"].values()]
        for critic in critics:
            with npu_replay.observe(critic.engine.module) as values, told() as more:
                output = critic.infer_batch(job.log_prob_batch(data))
            shown, found, lines = shown + values.shown, [*found, output["values"].values()], lines + more
        assert lines == []
        return shown, found

    before = passes()
    old = collected(actor.compute_log_prob(job.log_prob_batch(data)), tiny.split)
    between = passes()
    data.batch["old_log_probs"] = job.as_responses(old["log_probs"], data)
    actor.update_actor(job.update_batch(data, tiny))
    after = passes()
    for found in (between, after):
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(before[0], found[0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before[1], found[1], strict=True))
    nothing_is_on()


@case("the actor without its adapter")
def _lora() -> None:
    """verl asks a LoRA actor without its adapter for the reference's log-probs, as if for its own."""
    for mode in ("R2", "R3"):
        tiny = begin(mode=mode, lora=True)
        actor, plain = job.actor_worker(tiny), job.actor_worker(replace(tiny, mode="disabled"))
        routes = job.rollout_routes(tiny)
        data = job.batch(tiny.split, routes if mode == "R3" else None)

        def reference(worker: Any, data: Any = data) -> Any:
            return worker.compute_log_prob(
                job.without_padding(data, compute_loss=False, no_lora_adapter=True)
            )

        before = [one.clone() for one in routes]
        with told() as lines:
            found, wanted = reference(actor), reference(plain)
        assert torch.equal(found["log_probs"].values(), wanted["log_probs"].values())
        assert "routed_experts" not in found.keys()  # noqa: SIM118  a TensorDict iterates over rows
        assert lines == []
        assert all(torch.equal(a, b) for a, b in zip(before, routes, strict=True))
        with npu_replay.observe(actor.actor.engine.module) as seen:
            output = collected(actor.compute_log_prob(job.log_prob_batch(data)), tiny.split)
        shown = routes if mode == "R3" else list(output["routed_experts"].unbind())
        check_rows(seen.shown, shown, range(len(tiny.moe)), tiny)
        nothing_is_on()


@case("a second engine")
def _second() -> None:
    """NeMo #3687: one built after the first has recorded leaves the first as it is, and works itself."""
    tiny = begin(mode="R2")
    first = job.actor_worker(tiny)
    data, routes = recorded_batch(first, tiny)
    second = job.actor_worker(tiny)
    importlib.import_module("verl.utils.megatron.router_replay_patch").apply_router_replay_patch()
    with job.other_routers(second.actor.engine.module):
        others, their_routes = recorded_batch(second, tiny)
    assert not all(torch.equal(sets(a), sets(b)) for a, b in zip(routes, their_routes, strict=True))
    for actor, batch, wanted in ((first, data, routes), (second, others, their_routes)):
        with (
            npu_replay.observe(actor.actor.engine.module) as seen,
            job.other_routers(first.actor.engine.module),
        ):
            actor.update_actor(job.update_batch(batch, tiny))
        check_rows(seen.shown, wanted, range(len(tiny.moe)), tiny)
    nothing_is_on()


@case("offloaded in between")
def _offload() -> None:
    from verl.utils import megatron_utils

    tiny = begin(mode="R2", sharded=True)
    actor = job.actor_worker(tiny)
    module = actor.actor.engine.module
    data, routes = recorded_batch(actor, tiny)
    with job.other_routers(module):
        weights = [weight.detach().clone() for weight in module[0].parameters()]
        megatron_utils.offload_megatron_model_to_cpu(module)
        assert module[0].buffers[0].param_data.untyped_storage().size() == 0
        megatron_utils.load_megatron_model_to_gpu(module)
        assert all(torch.equal(a, b) for a, b in zip(weights, module[0].parameters(), strict=True))
        with npu_replay.observe(module) as seen:
            actor.update_actor(job.update_batch(data, tiny))
    check_rows(seen.shown, routes, range(len(tiny.moe)), tiny)


def _checkpoints(engine: Any, folder: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """verl's way to save and load; torch's on Megatron-core 0.12, whose own wants an older torch."""
    if importlib.import_module("megatron.core").__version__.startswith("0.12."):
        file, module = f"{folder}/{dist.get_rank()}", engine.module[0]
        return (
            lambda: torch.save(module.state_dict(), file),
            lambda: module.load_state_dict(torch.load(file, weights_only=False)),
        )
    return (
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder, del_local_after_load=False),
    )


def shared_folder() -> str:
    """A new one, the same on all ranks."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


@case("a checkpoint in between")
def _checkpoint() -> None:
    """Nothing of a replay is kept in a checkpoint; a loaded model replays when it is asked to."""
    tiny = begin(mode="R2", sharded=True)
    actor, plain = job.actor_worker(tiny), job.actor_worker(replace(tiny, mode="disabled"))
    engine = actor.actor.engine
    folder = shared_folder()
    data, routes = recorded_batch(actor, tiny)
    with job.other_routers(engine.module, plain.actor.engine.module):
        save, load = _checkpoints(engine, folder)
        save()
        job.fill(engine.module)
        load()
        for a, b in zip(
            engine.module[0].parameters(), plain.actor.engine.module[0].parameters(), strict=True
        ):
            assert torch.equal(a, b)
        nothing_is_on()
        with npu_replay.observe(engine.module) as live, torch.no_grad():
            actor.actor.infer_batch(job.log_prob_batch(job.batch(tiny.split)))
        with npu_replay.observe(plain.actor.engine.module) as wanted:
            plain.compute_log_prob(job.log_prob_batch(job.batch(tiny.split)))
        for a, b in zip(live.shown, wanted.shown, strict=True):
            assert torch.equal(a.ids, b.ids)
        with npu_replay.observe(engine.module) as seen:
            actor.update_actor(job.update_batch(data, tiny))
        check_rows(seen.shown, routes, range(len(tiny.moe)), tiny)


@case("routes in files")
def _files() -> None:
    """record_file writes what one job records, replay_file gives it to another; mini-batches too."""
    for split in (Split(), Split(pp=2)):
        folder = shared_folder()
        tiny = begin(mode="R2", split=split, files={"record_file": folder})
        actor = job.actor_worker(tiny)
        data, routes = recorded_batch(actor, tiny)
        actor.update_actor(job.update_batch(data, tiny))
        dist.barrier()
        stored = npu_replay.RouteStore(folder)
        assert len(stored) == len(LENGTHS)
        for number, one in zip(job.mine(tiny.split), routes, strict=True):
            found = stored.of(torch.cat(job.samples()[number]))
            assert torch.equal(found.ids, one)
            assert bool(found.recorded.all())
        again = replace(tiny, mode="R3", files={"replay_file": folder}, micro=1)
        other, batch = job.actor_worker(again), job.batch(tiny.split)
        module = other.actor.engine.module
        with job.other_routers(module):
            with npu_replay.observe(module) as first:
                output = collected(other.compute_log_prob(job.log_prob_batch(batch)), tiny.split)
            batch.batch["old_log_probs"] = job.as_responses(output["log_probs"], batch)
            with npu_replay.observe(module) as second:
                other.update_actor(job.update_batch(batch, again, mini_batch_size=4))
        for one in routes:
            one[-1] = 0  # verl's R3 leaves the last token to the router: nothing comes after it
        for seen in (first, second):
            check_rows(seen.shown, routes, range(len(tiny.moe)), again)
        nothing_is_on()
        with pytest.raises(ReplayError, match=r"under this name|other: nobody|so does this one"):
            recorded_batch(job.actor_worker(tiny), tiny)
        nothing_is_on()
        batch.batch["input_ids"] += batch.batch["attention_mask"] * (dist.get_rank() == 1)
        if tiny.split.pp > 1:
            return
        with pytest.raises(ReplayError, match=r"no routes of these tokens|so does this one"):
            other.compute_log_prob(job.log_prob_batch(batch))
        nothing_is_on()


@case("switched off")
def _off() -> None:
    """No line, no figures, no routes, with mode disabled; routes in the batch or not."""
    tiny = begin(mode="disabled")
    actor = job.actor_worker(tiny)
    data = job.batch(tiny.split, job.rollout_routes(tiny))
    with told() as lines, npu_replay.observe(actor.actor.engine.module) as seen:
        output = collected(actor.compute_log_prob(job.log_prob_batch(data)), tiny.split)
        assert "routed_experts" not in output
        data.batch["old_log_probs"] = job.as_responses(output["log_probs"], data)
        output = collected(actor.update_actor(job.update_batch(data, tiny)), tiny.split)
    assert lines == []
    assert not [name for name in output["metrics"] if name.startswith("npu_replay/")]
    half = len(seen.shown) // 2
    for a, b in zip(seen.shown[:half], seen.shown[half:], strict=True):
        assert torch.equal(a.ids, b.ids)


# What goes wrong


def _spoiled(kind: str, routes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The routes of a rank, the first sample's spoiled; all of them where it is a matter of shape."""
    found = [one.clone().to(torch.int16) for one in routes]
    if kind == "range":
        found[0][1, 1] = torch.tensor([EXPERTS + 3, 1])
    elif kind == "twice":
        found[0][1, 1] = torch.tensor([5, 5])
    elif kind == "layers":
        found = [torch.cat([one, one[:, :1]], dim=1) for one in found]
    return found


def _leave(actor: Any, run: Callable[[], Any], words: str, *, first: int = 1) -> None:
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


@case("one rank has bad routes in the first step")
def _bad_first() -> None:
    """All leave together, before the optimizer steps; with good routes the next pass is right."""
    words = {"range": "out of range", "twice": "expert twice", "layers": "number of layers"}
    for split in (Split(), Split(pp=2)):
        for kind, problem in words.items():
            tiny = begin(mode="R3", split=split)
            actor = job.actor_worker(tiny)
            routes = job.rollout_routes(tiny)
            spoiled = _spoiled(kind, routes) if dist.get_rank() == 1 else _as_wide(kind, routes)
            good, bad = job.batch(tiny.split, routes), job.batch(tiny.split, spoiled)
            engine = actor.actor.engine
            weights = [one.detach().clone() for one in engine.module[0].parameters()]
            for data in (good, bad):
                data.batch["old_log_probs"] = torch.zeros(len(data), job.RESPONSE)
            _leave(actor, lambda bad=bad, a=actor, t=tiny: a.update_actor(job.update_batch(bad, t)), problem)
            assert engine.gradients == [], "no step was made"
            assert all(torch.equal(a, b) for a, b in zip(weights, engine.module[0].parameters(), strict=True))
            with npu_replay.observe(engine.module) as seen:
                actor.update_actor(job.update_batch(good, tiny))
            check_rows(seen.shown, routes, range(len(tiny.moe)), tiny)


def _as_wide(kind: str, routes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [one.to(torch.int16) for one in routes]


@case("one rank has routes of another length")
def _bad_length() -> None:
    """Found in verl's forward step, where its other ranks wait for it."""
    tiny = begin(mode="R3")
    actor = job.actor_worker(tiny)
    data = job.batch(tiny.split, job.rollout_routes(tiny))
    data.batch["old_log_probs"] = torch.zeros(len(data), job.RESPONSE)
    update = job.update_batch(data, tiny)
    if dist.get_rank() == 1:
        each = list(update["routed_experts"].unbind())
        each[0] = each[0][:-3]
        update["routed_experts"] = torch.nested.as_nested_tensor(each, layout=torch.jagged)
    _leave(actor, lambda: actor.update_actor(update), "number of tokens")
    with npu_replay.observe(actor.actor.engine.module) as seen:
        actor.update_actor(job.update_batch(data, tiny))
    check_rows(seen.shown, job.rollout_routes(tiny), range(len(tiny.moe)), tiny)


@case("bad samples after the first step")
def _bad_later() -> None:
    """One is counted, two of eight are an error on all ranks, unless the user allows so many."""
    tiny = begin(mode="R3")
    actor = job.actor_worker(tiny)
    engine = actor.actor.engine
    routes = job.rollout_routes(tiny)
    second = dist.get_rank() == 1

    def update(bad: int) -> tuple[Any, list[RoutedExperts]]:
        """With so many bad samples, on rank 1."""
        given = [one.to(torch.int16) for one in routes]
        for one in given[: bad * second]:
            one[1, 1] = torch.tensor([EXPERTS + 3, 1])
        data = job.batch(tiny.split, given)
        data.batch["old_log_probs"] = torch.zeros(len(data), job.RESPONSE)
        with npu_replay.observe(engine.module) as seen:
            output = actor.update_actor(job.update_batch(data, tiny))
        return collected(output, tiny.split)["metrics"], seen.shown

    def counted(bad: int) -> None:
        metrics, shown = update(bad)
        assert set(metrics["npu_replay/bad_samples"]) == {float(bad)}
        left = [one if number >= bad * second else torch.zeros_like(one) for number, one in enumerate(routes)]
        check_rows(shown, left, range(len(tiny.moe)), tiny)

    counted(0)
    counted(1)
    steps = len(engine.gradients)
    _leave(actor, lambda: update(2), "2 of 8 samples have routes that can't be used", first=0)
    assert len(engine.gradients) == steps
    os.environ["NPU_REPLAY_BAD_SAMPLES"] = "0.25"
    counted(2)
    del os.environ["NPU_REPLAY_BAD_SAMPLES"]


@contextlib.contextmanager
def _failing_on_rank_1(where: str) -> Iterator[None]:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("never thought of")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(f"npu_replay.compat.{where}", fails)
        yield


@case("a setting of one rank's own")
def _own_setting() -> None:
    """Ranks that decide by different numbers would part: one is told that they differ, before the pass."""
    tiny = begin(mode="R3")
    actor = job.actor_worker(tiny)
    data = job.batch(tiny.split, job.rollout_routes(tiny))
    data.batch["old_log_probs"] = torch.zeros(len(data), job.RESPONSE)

    def update() -> Any:
        return actor.update_actor(job.update_batch(data, tiny))

    name = "NPU_REPLAY_BAD_SAMPLES"
    wrong = (
        ("0.25", f"{name} differs between the ranks", 0),
        ("few", f"{name} is a share of the samples", 1),
    )
    for value, words, first in wrong:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setenv(name, value)
            _leave(actor, update, words, first=first)
    update()


@case("routes far from the routers' own choice")
def _far() -> None:
    """Of other samples, or in other rows than the tokens: said in the first update, before it steps."""
    tiny = begin(mode="R3")
    actor = job.actor_worker(tiny)
    data = job.batch(tiny.split, job.rollout_routes(tiny))
    data.batch["old_log_probs"] = torch.zeros(len(data), job.RESPONSE)

    def update() -> Any:
        return actor.update_actor(job.update_batch(data, tiny))

    name = "NPU_REPLAY_MAX_LIVE_MISMATCH"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(name)
        _leave(actor, update, "far from what the routers would choose for these tokens", first=0)
        patch.setenv(name, "much")
        _leave(actor, update, f"{name} is a share of the token-layers", first=0)
    assert not actor.actor.engine.gradients
    update()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(name)
        update()  # not the first any more


@case("one rank fails in a way that nobody has thought of")
def _unthought() -> None:
    """Where it opens a pass, and where pipeline stages gather: the others don't wait for it."""
    tiny = begin(mode="R2", split=Split(pp=2))
    actor = job.actor_worker(tiny)
    with _failing_on_rank_1("verl.actions.StepRecording"):
        _leave(actor, lambda: recorded_batch(actor, tiny), "this rank can't record")
    with (
        _failing_on_rank_1("verl.functions._of_this_stage"),
        pytest.raises(ReplayError, match="pipeline rank 1: KeyError"),
    ):
        recorded_batch(actor, tiny)
    nothing_is_on()
    recorded_batch(actor, tiny)


@case("routes are missing")
def _missing_routes() -> None:
    """T20: R2 without a record, R3 without a rollout's routes: an error, and nothing of an earlier pass."""
    for mode in ("R2", "R3"):
        tiny = begin(mode=mode)
        actor = job.actor_worker(tiny)
        whole = job.batch(tiny.split, job.rollout_routes(tiny))
        whole.batch["old_log_probs"] = torch.zeros(len(whole), job.RESPONSE)
        actor.update_actor(job.update_batch(whole, tiny))
        data = job.batch(tiny.split)
        data.batch["old_log_probs"] = torch.zeros(len(data), job.RESPONSE)
        with pytest.raises(RuntimeError, match=r"no routes|routed_experts"):
            actor.update_actor(job.update_batch(data, tiny))
        nothing_is_on()
        with npu_replay.observe(actor.actor.engine.module) as live, told() as lines:
            actor.actor.infer_batch(job.log_prob_batch(job.batch(tiny.split)))
        plain = job.actor_worker(replace(tiny, mode="disabled"))
        for a, b in zip(
            plain.actor.engine.module[0].parameters(), actor.actor.engine.module[0].parameters(), strict=True
        ):
            a.data.copy_(b)
        with npu_replay.observe(plain.actor.engine.module) as wanted:
            plain.compute_log_prob(job.log_prob_batch(job.batch(tiny.split)))
        assert lines == []
        for a, b in zip(live.shown, wanted.shown, strict=True):
            assert torch.equal(a.ids, b.ids)


@case("a rollout's routes under R2")
def _rollouts_routes() -> None:
    """T4: what the update replays is what the batch holds; a record beside it is the trainer's own choice."""
    tiny = begin(mode="R2")
    actor = job.actor_worker(tiny)
    routes = job.rollout_routes(tiny)
    data = job.batch(tiny.split, routes)
    with npu_replay.observe(actor.actor.engine.module) as first:
        output = collected(actor.compute_log_prob(job.log_prob_batch(data)), tiny.split)
    chosen = output.get("routed_experts")
    columns = range(len(tiny.moe))
    check_rows(first.shown, routes if chosen is None else list(chosen.unbind()), columns, tiny)
    data.batch["old_log_probs"] = job.as_responses(output["log_probs"], data)
    if chosen is not None:
        data.batch["routed_experts"] = chosen
        routes = list(chosen.unbind())
    with (
        job.other_routers(actor.actor.engine.module),
        npu_replay.observe(actor.actor.engine.module) as second,
    ):
        actor.update_actor(job.update_batch(data, tiny))
    check_rows(second.shown, routes, columns, tiny)
