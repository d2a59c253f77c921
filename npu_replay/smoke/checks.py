"""What `npu-replay smoke` examines: one class a feature, each able to fail alone.

`examine` runs on every rank, and `judge` on what all of them found. A feature makes what it needs by itself:
the routes to replay are read by the smoke test's own witness, so that a broken `record` leaves `replay` its
own verdict.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import npu_replay
from npu_replay.compat import probe
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.smoke.job import Job, Wrong
from npu_replay.smoke.model import (
    Batch,
    Outcome,
    Routing,
    Token,
    build,
    losses_apart,
    perturbed,
    plan,
    step,
)
from npu_replay.smoke.witness import Witness

CLOSE = 1e-3
"""How far losses and gradients may be apart where a device doesn't add in the same order twice. Other experts
move both by far more."""


class Trial:
    """One way of routing on this rank: the model, its micro-batches, and the untouched run of them."""

    def __init__(self, job: Job, routing: Routing) -> None:
        self.job, self.routing = job, routing
        self.chunks = build(job.split, routing, job.device)
        self.parallel = ParallelLayout.from_megatron(self.chunks)
        self.batches = plan(job.split, self.parallel, job.device)

    @functools.cached_property
    def untouched(self) -> tuple[Outcome, list[RoutedExperts]]:
        """Outcome and routes of the model by itself, as the witness saw them."""
        with Witness(self.chunks) as witness:
            outcome = step(self.chunks, self.batches)
        return outcome, witness.routes()

    @property
    def routes(self) -> list[RoutedExperts]:
        return self.untouched[1]

    def foreign(self) -> list[RoutedExperts]:
        """Routes that no router would choose, others for each micro-batch and rank."""
        generator = torch.Generator().manual_seed(13 + self.job.rank)
        return [
            RoutedExperts(
                ids=torch.rand(*one.ids.shape[:2], one.num_experts, generator=generator).topk(one.topk)[1],
                layers=one.layers,
                num_experts=one.num_experts,
            )
            for one in self.routes
        ]

    def recomputing(self) -> list[nn.Module]:
        """The same model with full activation recompute."""
        return build(self.job.split, self.routing, self.job.device, recompute=True)


class Feature:
    """One thing that has to work.

    Attributes:
        name: as the report names it.
    """

    name = ""

    def examine(self, trial: Trial) -> Any:
        """Look on this rank; what the ranks' judgement needs of it.

        Raises:
            Wrong: it doesn't work; says why in one line. Not where other ranks might still wait for this one.
        """
        raise NotImplementedError

    def judge(self, found: list[Any]) -> str:
        """From what all ranks found, one line that says what was seen.

        Raises:
            Wrong: it doesn't work, seen over all ranks.
        """
        raise NotImplementedError


class Collectives(Feature):
    name = "collectives"

    def examine(self, trial: Trial) -> int:
        groups = [None, *(group for group in trial.parallel.groups if dist.get_world_size(group) > 1)]
        problems = [problem for number, group in enumerate(groups) for problem in _sums(trial, number, group)]
        if problems:
            raise Wrong("; ".join(problems))
        return len(groups)

    def judge(self, found: list[int]) -> str:
        return f"int64 and float32 summed right, bytes sent right, over {len(found)} ranks, {found[0]} groups"


def _sums(trial: Trial, number: int, group: Any) -> list[str]:
    """What is wrong with the collectives that npu_replay uses, in one group."""
    ranks = [dist.get_global_rank(group, one) for one in range(dist.get_world_size(group))] if group else None
    ranks = ranks or list(range(trial.job.world))
    where = f"group {number} of {len(ranks)} ranks"
    problems = []
    for dtype, one in ((torch.int64, 2**40 + 1), (torch.float32, 0.5)):  # above what a float32 can count
        given = torch.tensor([one, trial.job.rank], dtype=dtype, device=trial.job.device)
        dist.all_reduce(given, group=group)
        expected = [one * len(ranks), sum(ranks)]
        if given.tolist() != expected:
            problems.append(f"all_reduce of {dtype} over {where} gave {given.tolist()}, not {expected}")
    data = torch.full((5,), trial.job.rank % 251, dtype=torch.uint8, device=trial.job.device)
    dist.broadcast(data, ranks[-1], group)
    if data.tolist() != [ranks[-1] % 251] * 5:
        problems.append(f"broadcast of uint8 over {where} gave {data.tolist()}")
    return problems


class Model(Feature):
    name = "model"

    def examine(self, trial: Trial) -> dict[str, float]:
        outcome, _ = trial.untouched
        again = step(trial.chunks, trial.batches)
        if problem := outcome.problem() or again.problem():
            raise Wrong(f"{problem}, without npu_replay")
        return {
            "loss": sum(outcome.losses.values()),
            "tokens": len(outcome.losses),
            "apart": again.distance(outcome),
        }

    def judge(self, found: list[dict[str, float]]) -> str:
        tokens = sum(one["tokens"] for one in found)
        apart = max(one["apart"] for one in found)
        if apart > CLOSE:
            raise Wrong(f"two runs of the same step are {_far(apart)}, without npu_replay")
        return f"trains, loss {sum(one['loss'] for one in found) / tokens:.3f}, twice {_close(apart)}"


class Record(Feature):
    name = "record"

    def examine(self, trial: Trial) -> dict[str, float]:
        untouched, routes = trial.untouched
        with npu_replay.observe(trial.chunks) as observation, npu_replay.record(trial.chunks) as recording:
            outcome = step(trial.chunks, trial.batches)
        if (count := len(recording.routes)) != len(trial.batches):
            raise Wrong(f"{count} micro-batches were recorded, of {len(trial.batches)}")
        for what, theirs in (("npu_replay.observe", observation.shown), ("the witness", routes)):
            differing = sum(_unlike(a, b) for a, b in zip(recording.routes, theirs, strict=True))
            if differing:
                raise Wrong(f"{differing} token-layers were recorded otherwise than {what} saw them")
        return {
            "rows": sum(one.ids.shape[0] * one.ids.shape[1] for one in routes),
            "apart": outcome.distance(untouched),
        }

    def judge(self, found: list[dict[str, float]]) -> str:
        apart = max(one["apart"] for one in found)
        if apart > CLOSE:
            raise Wrong(f"a recorded step and an untouched one are {_far(apart)}")
        return (
            f"{sum(one['rows'] for one in found):.0f} token-layers as the routers show, step {_close(apart)}"
        )


class Collect(Feature):
    """The collected routes have to fit the same sequences in other micro-batches of another length, where
    other ranks hold other tokens: the losses of all tokens tell."""

    name = "collect"

    def examine(self, trial: Trial) -> tuple[dict[Any, float], dict[Any, float]]:
        with npu_replay.record(trial.chunks) as recording:
            plain = step(trial.chunks, trial.batches, forward_only=True)
        layouts = [batch.layout for batch in trial.batches]
        merged = npu_replay.collect(recording, layouts, trial.parallel, patience=trial.job.patience)
        numbers = [number for batch in trial.batches for number in batch.numbers]
        sequences = dict(zip(numbers, merged or [], strict=True))
        other = plan(trial.job.split, trial.parallel, trial.job.device, other=True)
        routes = trial.job.together(lambda: [_gathered(one, sequences, trial.parallel) for one in other])
        with npu_replay.replay(trial.chunks, routes):
            again = step(trial.chunks, other, forward_only=True)
        return _named(trial, plain.losses), _named(trial, again.losses)

    def judge(self, found: list[tuple[dict[Any, float], dict[Any, float]]]) -> str:
        plain, again = (
            {token: loss for part in parts for token, loss in part.items()}
            for parts in zip(*found, strict=True)
        )
        apart = losses_apart(again, plain)
        if apart > CLOSE:
            raise Wrong(
                f"replayed in other micro-batches, the collected routes give losses that are {_far(apart)}: "
                "they aren't the routes of their tokens"
            )
        return f"{len(plain)} tokens have their own routes in other micro-batches too"


def _gathered(batch: Batch, sequences: dict[int, RoutedExperts], parallel: ParallelLayout) -> RoutedExperts:
    return batch.layout.gather([sequences[number] for number in batch.numbers], layers=parallel.moe_layers)


def _named(trial: Trial, losses: dict[Token, float]) -> dict[Any, float]:
    """The losses by data-parallel rank too, which has sequences of its own."""
    return {(trial.parallel.dp_rank, *token): loss for token, loss in losses.items()}


class Mismatch(Feature):
    name = "mismatch"

    def examine(self, trial: Trial) -> tuple[int, int]:
        routes = trial.routes
        with perturbed(trial.chunks), Witness(trial.chunks) as witness:
            step(trial.chunks, trial.batches)
        return witness.differing(routes), witness.rows()

    def judge(self, found: list[tuple[int, int]]) -> str:
        differing, rows = (sum(numbers) for numbers in zip(*found, strict=True))
        if not differing:
            raise Wrong("other router weights choose the same experts, so a replay would show nothing")
        return (
            f"without replay, other router weights choose otherwise in {differing / rows:.0%} of token-layers"
        )


class Replay(Feature):
    name = "replay"

    def examine(self, trial: Trial) -> int:
        routes = trial.routes
        replay = npu_replay.replay(trial.chunks, routes)
        with perturbed(trial.chunks), Witness(trial.chunks) as witness, replay:
            outcome = step(trial.chunks, trial.batches)
        _check_shown(witness, routes)
        if problem := outcome.problem():
            raise Wrong(problem)
        return witness.rows()

    def judge(self, found: list[int]) -> str:
        return f"with them, all {sum(found)} token-layers show the recorded experts"


def _check_shown(witness: Witness, routes: list[RoutedExperts]) -> None:
    wanted = {(label, number) for label in witness.routers for number in range(len(routes))}
    if witness.calls() != wanted:
        raise Wrong(f"{len(witness.calls())} calls of routers were seen, of {len(wanted)}")
    if differing := witness.differing(routes):
        raise Wrong(f"{differing} of {witness.rows()} token-layers show other experts than were replayed")


class Recompute(Feature):
    name = "recompute"

    def examine(self, trial: Trial) -> float:
        foreign = trial.foreign()
        with npu_replay.replay(trial.chunks, foreign):
            kept = step(trial.chunks, trial.batches)
        chunks = trial.recomputing()
        with Witness(chunks) as witness, npu_replay.replay(chunks, foreign):
            again = step(chunks, trial.batches)
        _check_shown(witness, foreign)
        if lacking := witness.calls() - witness.calls_again():
            raise Wrong(f"{len(lacking)} calls of routers were not recomputed, of {len(witness.calls())}")
        if differing := witness.differing_again(foreign):
            raise Wrong(f"{differing} token-layers of the recompute show other experts than their forward")
        return again.distance(kept)

    def judge(self, found: list[float]) -> str:
        apart = max(found)
        if apart > CLOSE:
            raise Wrong(f"gradients with recompute and without are {_far(apart)}, under the same routes")
        return f"each takes the routes of its own forward; gradients {_close(apart)}"


class Gradients(Feature):
    name = "gradients"

    def examine(self, trial: Trial) -> float:
        untouched, routes = trial.untouched
        with npu_replay.replay(trial.chunks, routes):
            outcome = step(trial.chunks, trial.batches)
        if problem := outcome.problem():
            raise Wrong(problem)
        return outcome.distance(untouched)

    def judge(self, found: list[float]) -> str:
        apart = max(found)
        if apart > CLOSE:
            raise Wrong(f"a replay of the routers' own choice and an untouched step are {_far(apart)}")
        return f"finite; a replay of the routers' own choice is {_close(apart)}"


class OwnChoice(Feature):
    name = "own choice"

    def examine(self, trial: Trial) -> tuple[int, int]:
        routes = [_with_holes(one) for one in trial.foreign()]
        with Witness(trial.chunks) as witness, npu_replay.replay(trial.chunks, routes) as session:
            step(trial.chunks, trial.batches)
        _check_shown(witness, routes)
        holes = sum(int((~one.recorded).sum()) for one in routes)
        if session.metrics()["rows_without_route"] != holes:
            raise Wrong(f"{holes} rows have no route; metrics() says otherwise: {session.metrics()}")
        return _other_than_own(witness, routes), holes

    def judge(self, found: list[tuple[int, int]]) -> str:
        differing, holes = (sum(numbers) for numbers in zip(*found, strict=True))
        if differing:
            raise Wrong(f"{differing} rows without a route show other experts than the router's own choice")
        return f"{holes} rows without a route take the router's own choice"


def _with_holes(routes: RoutedExperts) -> RoutedExperts:
    """The same, every third row without a route."""
    recorded = torch.arange(len(routes)) % 3 != 0
    return RoutedExperts(
        ids=routes.ids, layers=routes.layers, num_experts=routes.num_experts, recorded=recorded
    )


def _other_than_own(witness: Witness, routes: list[RoutedExperts]) -> int:
    """Rows without a route whose output isn't what the router gives for the same input by itself."""
    total = 0
    with torch.no_grad():
        for label, router in witness.routers.items():
            for number, seen in enumerate(witness.forwards[label]):
                own = router.shows(router.module(*seen.args, **seen.kwargs))
                differs = (own != seen.shown).any(dim=1).cpu()
                total += int((differs & ~routes[number].recorded).sum())
    return total


class Bytes(Feature):
    name = "bytes"

    def examine(self, trial: Trial) -> tuple[int, int]:
        routes = [*trial.routes, *map(_with_holes, trial.foreign())]
        size = 0
        for one in routes:
            data = one.to_bytes()
            size += len(data)
            if RoutedExperts.from_bytes(data) != one:
                raise Wrong("routes come back from their bytes as others")
        by_file = _has_safetensors()
        if by_file:
            with tempfile.TemporaryDirectory(prefix="npu_replay_smoke_") as folder:
                path = Path(folder, "routes.safetensors")
                routes[0].save(path)
                if RoutedExperts.load(path) != routes[0]:
                    raise Wrong("routes come back from their file as others")
        return size, int(by_file)

    def judge(self, found: list[tuple[int, int]]) -> str:
        files = "and from a file" if found[0][1] else "(no safetensors here, so no file was tried)"
        return f"{sum(size for size, _ in found)} bytes come back as the same routes, {files}"


def _has_safetensors() -> bool:
    return any(product.name == "safetensors" and product.usable for product in probe.products())


FEATURES: tuple[Feature, ...] = (
    Model(),
    Record(),
    Collect(),
    Mismatch(),
    Replay(),
    Recompute(),
    Gradients(),
    OwnChoice(),
    Bytes(),
)
"""What is examined for each way of routing, after `Collectives` and before `left_behind`."""


def left_behind(trials: list[Trial], topk: tuple[Any, Any]) -> str:
    """What npu_replay has left in torch, in Megatron and in the models, after uninstall(); empty if nothing.

    Args:
        topk: torch.topk and torch.Tensor.topk as they were before the first block.
    """
    found = [f"{patch.where} is still replaced" for patch in npu_replay.report().patches]
    found += [f"a block is still open: {block}" for block in npu_replay.report().open_sessions]
    if (torch.topk, torch.Tensor.topk) != topk:
        found.append("torch.topk is still replaced")
    for trial in trials:
        for module in (module for chunk in trial.chunks for module in chunk.modules()):
            if module._forward_hooks or module._forward_pre_hooks:
                found.append(f"a {type(module).__name__} still has hooks")
    return "; ".join(dict.fromkeys(found))


def _unlike(ours: RoutedExperts, theirs: RoutedExperts) -> int:
    """Token-layers whose sets of experts differ."""
    if ours.ids.shape != theirs.ids.shape or ours.layers != theirs.layers:
        return max(ours.ids.shape[0] * ours.ids.shape[1], 1)
    return int((ours.ids.sort(dim=2).values != theirs.ids.sort(dim=2).values).any(dim=2).sum())


def _far(apart: float) -> str:
    return f"{apart:.1e} apart" if math.isfinite(apart) else "not comparable: a loss or a gradient is missing"


def _close(apart: float) -> str:
    return "the same to the last bit" if apart == 0 else f"within {apart:.0e}"
