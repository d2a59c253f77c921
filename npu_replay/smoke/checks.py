"""Examine what `npu-replay smoke` reports: one function a feature, each able to fail alone.

A feature looks on its own rank, yields what it found there, gets back what all ranks found, and returns one
line that says what was seen. What the routers choose is read by `npu_replay.observe`, the routes to replay
too, so a broken `record` leaves `replay` its own verdict.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import npu_replay
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes.mismatch import differing_token_layers
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.smoke.job import Job, Wrong
from npu_replay.smoke.model import Outcome, Routing, build, losses_apart, perturbed, plan, routers_of, step

CLOSE = 1e-3
"""How far losses and gradients may be apart where a device doesn't add in the same order twice. Other experts
move both by far more."""

Examination: TypeAlias = Generator[Any, list[Any], str]
"""A feature that is examined. It raises `Wrong` where it doesn't work, with why in one line: before its yield
seen on this rank, and not where others might still wait for this one; after it seen over all ranks."""


class Trial:
    """One way of routing on this rank: the model, its micro-batches, and the untouched run of them."""

    def __init__(self, job: Job, routing: Routing) -> None:
        self.job, self.routing = job, routing
        self.chunks = build(job.options, routing, job.device)
        self.parallel = ParallelLayout.from_megatron(self.chunks)
        self.batches = plan(job.options, self.parallel, job.device)

    @functools.cached_property
    def untouched(self) -> tuple[Outcome, list[RoutedExperts]]:
        """The outcome of the model by itself, and the experts that its routers showed."""
        with npu_replay.observe(self.chunks) as observation:
            outcome = self.step()
        return outcome, observation.shown

    @property
    def routes(self) -> list[RoutedExperts]:
        """The routes of the model by itself."""
        return self.untouched[1]

    def step(self, **how: bool) -> Outcome:
        """A training step over the micro-batches."""
        return step(self.chunks, self.batches, **how)

    def foreign(self, *, holes: bool = False) -> list[RoutedExperts]:
        """Routes that no router would choose, others for each micro-batch and rank.

        Args:
            holes: every third row has no route.
        """
        generator = torch.Generator().manual_seed(13 + self.job.rank)
        return [
            RoutedExperts(
                ids=torch.rand(*one.ids.shape[:2], one.num_experts, generator=generator).topk(one.topk)[1],
                layers=one.layers,
                num_experts=one.num_experts,
                recorded=torch.arange(len(one)) % 3 != 0 if holes else None,
            )
            for one in self.routes
        ]


def collectives(trial: Trial) -> Examination:
    """The collectives that npu_replay uses give the right numbers, in the groups that it uses."""
    device, rank, problems = trial.job.device, trial.job.rank, []
    groups = [dist.group.WORLD, *(one for one in trial.parallel.groups if dist.get_world_size(one) > 1)]
    for number, group in enumerate(groups):
        ranks = dist.get_process_group_ranks(group)
        where = f"group {number} of {len(ranks)} ranks"
        for dtype, one in ((torch.int64, 2**40 + 1), (torch.float32, 0.5)):  # above what a float32 can count
            given = torch.tensor([one, rank], dtype=dtype, device=device)
            dist.all_reduce(given, group=group)
            expected = [one * len(ranks), sum(ranks)]
            if given.tolist() != expected:
                problems.append(f"all_reduce of {dtype} over {where} gave {given.tolist()}, not {expected}")
        data = torch.full((5,), rank % 251, dtype=torch.uint8, device=device)
        dist.broadcast(data, ranks[-1], group)
        if data.tolist() != [ranks[-1] % 251] * 5:
            problems.append(f"broadcast of uint8 over {where} gave {data.tolist()}")
    Wrong.unless(not problems, "; ".join(problems))
    everyone = yield None
    return (
        f"int64 and float32 summed right, bytes sent right, over {len(everyone)} ranks, {len(groups)} groups"
    )


def model(trial: Trial) -> Examination:
    """The model trains without npu_replay, twice alike."""
    outcome, again = trial.untouched[0], trial.step()
    problem = outcome.problem() or again.problem()
    Wrong.unless(not problem, f"{problem}, without npu_replay")
    everyone = yield sum(outcome.losses.values()), len(outcome.losses), again.distance(outcome)
    losses, tokens, apart = zip(*everyone, strict=True)
    close = _close(apart, "two runs of the same step are", ", without npu_replay")
    return f"trains, loss {sum(losses) / sum(tokens):.3f}, twice {close}"


def record(trial: Trial) -> Examination:
    """The recorded ids are those that the routers show, and the step is as it is without."""
    untouched, routes = trial.untouched
    with npu_replay.observe(trial.chunks) as observation, npu_replay.record(trial.chunks) as recording:
        outcome = trial.step()
    recorded, due = recording.routes, len(trial.batches)
    Wrong.unless(len(recorded) == due, f"{len(recorded)} micro-batches were recorded, of {due}")
    lacking = holes(recorded)
    Wrong.unless(not lacking, f"{lacking} rows were recorded without a route")
    seen = {"npu_replay.observe saw them": observation.shown, "the untouched step chose": routes}
    for whose, other in seen.items():
        count = differing(recorded, other)
        Wrong.unless(not count, f"{count} token-layers were recorded otherwise than {whose}")
    everyone = yield token_layers(recorded), outcome.distance(untouched)
    rows, apart = zip(*everyone, strict=True)
    close = _close(apart, "a recorded step and an untouched one are")
    return f"{sum(rows)} token-layers as the routers show, step {close}"


def collect(trial: Trial) -> Examination:
    """The collected routes have to fit the same sequences in other micro-batches of another length, where
    other ranks hold other tokens: the losses of all tokens tell."""
    with npu_replay.record(trial.chunks) as recording:
        plain = trial.step(forward_only=True)
    layouts = [batch.layout for batch in trial.batches]
    merged = npu_replay.collect(recording, layouts, trial.parallel, patience=trial.job.options.patience)
    numbers = [number for batch in trial.batches for number in batch.numbers]
    samples = dict(zip(numbers, merged or [], strict=True))
    other = plan(trial.job.options, trial.parallel, trial.job.device, other=True)
    layers = trial.parallel.moe_layers
    routes = [one.layout.gather([samples[n] for n in one.numbers], layers=layers) for one in other]
    with npu_replay.replay(trial.chunks, routes):
        again = step(trial.chunks, other, forward_only=True)
    # By data-parallel rank too, which has sequences of its own.
    everyone = yield [
        {(trial.parallel.dp_rank, *token): loss for token, loss in outcome.losses.items()}
        for outcome in (plain, again)
    ]
    before, after = (
        {token: part[token] for part in parts for token in part} for parts in zip(*everyone, strict=True)
    )
    apart = losses_apart(after, before)
    begins = "replayed in other micro-batches, the collected routes give losses that are"
    _close([apart], begins, ": they aren't the routes of their tokens")
    return f"{len(before)} tokens have their own routes in other micro-batches too"


def mismatch(trial: Trial) -> Examination:
    """Without replay, other router weights choose otherwise."""
    routes = trial.routes
    with perturbed(trial.chunks), npu_replay.observe(trial.chunks) as observation:
        trial.step()
    everyone = yield differing(observation.shown, routes), token_layers(routes)
    wrong, rows = map(sum, zip(*everyone, strict=True))
    Wrong.unless(wrong > 0, "other router weights choose the same experts, so a replay would show nothing")
    return f"without replay, other router weights choose otherwise in {wrong / rows:.0%} of token-layers"


def replay(trial: Trial) -> Examination:
    """With other router weights, the routers show the recorded experts."""
    routes = trial.routes
    session = npu_replay.replay(trial.chunks, routes)
    with perturbed(trial.chunks), npu_replay.observe(trial.chunks) as observation, session:
        outcome = trial.step()
    _check_shown(observation.shown, routes)
    Wrong.unless(not outcome.problem(), outcome.problem())
    everyone = yield token_layers(routes)
    return f"with them, all {sum(everyone)} token-layers show the recorded experts"


def recompute(trial: Trial) -> Examination:
    """Each recompute takes the experts of its own forward: the gradients tell."""
    foreign = trial.foreign()
    with npu_replay.replay(trial.chunks, foreign):
        kept = trial.step()
    chunks = build(trial.job.options, trial.routing, trial.job.device, recompute=True)
    session = npu_replay.replay(chunks, foreign)
    with counted(chunks) as calls, npu_replay.observe(chunks) as observation, session:
        again = step(chunks, trial.batches)
    _check_shown(observation.shown, foreign)
    due = len(routers_of(chunks)) * len(trial.batches)
    again_due = 2 * due - len(calls)
    Wrong.unless(not again_due, f"{again_due} calls of routers were not recomputed, of {due}")
    everyone = yield again.distance(kept)
    close = _close(everyone, "gradients with recompute and without are", ", under the same routes")
    return f"each takes the routes of its own forward; gradients {close}"


@contextlib.contextmanager
def counted(chunks: Iterable[nn.Module]) -> Iterator[list[int]]:
    """Yield a list that grows by the label of a router with each of its calls, recomputes too."""
    calls: list[int] = []
    with contextlib.ExitStack() as undo:
        for router in routers_of(list(chunks)):
            note = functools.partial(lambda label, *_: calls.append(label), router.label)
            undo.callback(router.module.register_forward_hook(note).remove)
        yield calls


def gradients(trial: Trial) -> Examination:
    """A replay of what the routers choose anyway is an untouched step."""
    untouched, routes = trial.untouched[0], trial.routes
    with npu_replay.replay(trial.chunks, routes):
        outcome = trial.step()
    Wrong.unless(not outcome.problem(), outcome.problem())
    everyone = yield outcome.distance(untouched)
    close = _close(everyone, "a replay of the routers' own choice and an untouched step are")
    return f"finite; a replay of the routers' own choice is {close}"


def own_choice(trial: Trial) -> Examination:
    """A row without a route takes what its router chooses in the model by itself.

    It can be told, since no token of this model looks at another: a row without a route in any layer goes
    its own way through all of them, whatever the others are given.
    """
    own, routes = trial.routes, trial.foreign(holes=True)
    session = npu_replay.replay(trial.chunks, routes)
    with npu_replay.observe(trial.chunks) as observation, session:
        trial.step()
    _check_shown(observation.shown, routes)
    count, said = holes(routes), session.metrics()
    right = said["rows_without_route"] == count
    Wrong.unless(right, f"{count} rows have no route; metrics() says otherwise: {said}")
    shown, chosen = (
        [one.take((~route.recorded).nonzero().flatten()) for one, route in zip(found, routes, strict=True)]
        for found in (observation.shown, own)
    )
    everyone = yield differing(shown, chosen), count
    wrong, rows = map(sum, zip(*everyone, strict=True))
    others = "token-layers of rows without a route show other experts than the router's own choice"
    Wrong.unless(not wrong, f"{wrong} {others}")
    return f"{rows} rows without a route take the router's own choice"


def as_bytes(trial: Trial) -> Examination:
    """Routes come back the same from their bytes, and from a file."""
    routes = [*trial.routes, *trial.foreign(holes=True)]
    sent = [one.to_bytes() for one in routes]
    back = [RoutedExperts.from_bytes(data) for data in sent]
    Wrong.unless(back == routes, "routes come back from their bytes as others")
    with tempfile.TemporaryDirectory(prefix="npu_replay_smoke_") as folder:
        path = Path(folder, "routes.safetensors")
        routes[0].save(path)
        Wrong.unless(RoutedExperts.load(path) == routes[0], "routes come back from their file as others")
    everyone = yield sum(map(len, sent))
    return f"{sum(everyone)} bytes come back as the same routes, and from a file"


FEATURES: dict[str, Callable[[Trial], Examination]] = {
    "collectives": collectives,  # once; the others for each way of routing
    "model": model,
    "record": record,
    "collect": collect,
    "mismatch": mismatch,
    "replay": replay,
    "recompute": recompute,
    "gradients": gradients,
    "own choice": own_choice,
    "bytes": as_bytes,
}
"""What is examined, by the name in the report, after the start and before `left_behind`."""


def left_behind(chunks: Iterable[nn.Module], topk: tuple[Any, Any]) -> str:
    """What npu_replay has left in torch, in Megatron and in the models, after uninstall(); empty if nothing.

    Args:
        topk: torch.topk and torch.Tensor.topk as they were before the first block.
    """
    report = npu_replay.report()
    found = [f"{patch.where} is still replaced" for patch in report.patches]
    found += [f"a block is still open: {block}" for block in report.open_sessions]
    if (torch.topk, torch.Tensor.topk) != topk:
        found.append("torch.topk is still replaced")
    for module in (module for chunk in chunks for module in chunk.modules()):
        if module._forward_hooks or module._forward_pre_hooks:
            found.append(f"a {type(module).__name__} still has hooks")
    return "; ".join(dict.fromkeys(found))


def differing(ours: list[RoutedExperts], theirs: list[RoutedExperts]) -> int:
    """Count the token-layers whose experts differ, where both have a route."""
    return sum(int(differing_token_layers(*pair).sum()) for pair in zip(ours, theirs, strict=True))


def token_layers(routes: list[RoutedExperts]) -> int:
    return sum(len(one) * len(one.layers) for one in routes)


def holes(routes: list[RoutedExperts]) -> int:
    """Count the rows without a route."""
    return sum(int((~one.recorded).sum()) for one in routes)


def _check_shown(shown: list[RoutedExperts], routes: list[RoutedExperts]) -> None:
    rows, wanted = ([len(one) for one in part] for part in (shown, routes))
    Wrong.unless(rows == wanted, f"micro-batches of {rows} rows were seen, of {wanted}")
    lacking = holes(shown)
    Wrong.unless(not lacking, f"{lacking} rows show fewer experts than top-k")
    wrong, of = differing(shown, routes), token_layers(shown)
    Wrong.unless(not wrong, f"{wrong} of {of} token-layers show other experts than were replayed")


def _close(everyone: Iterable[float], begins: str, ends: str = "") -> str:
    """How close two steps are on all ranks, in words.

    Raises:
        Wrong: «BEGINS 1.0e-01 apartENDS», where they are further apart than `CLOSE`.
    """
    apart = max(everyone)
    far = f"{apart:.1e} apart" if math.isfinite(apart) else "not comparable: a loss or a gradient is missing"
    Wrong.unless(apart <= CLOSE, f"{begins} {far}{ends}")
    return "the same to the last bit" if apart == 0 else f"within {apart:.0e}"
