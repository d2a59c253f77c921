"""Examine the features of `npu-replay smoke`: one function each.

A feature runs on every rank, raises `Wrong` where it doesn't work, and returns one line of what was seen.
`npu_replay.observe` reads what routers choose, also the routes to replay, so a broken `record` doesn't affect
the verdict on `replay`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import npu_replay
from npu_replay.errors import ReplayError
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.smoke.model import Batch, Outcome, build, distance, plan, routers_of, step
from npu_replay.smoke.options import Options

CLOSE = 1e-3
"""The tolerance of losses and gradients on devices that don't add in a fixed order.

Other experts change both by far more.
"""
_OTHERS = "show other experts than were replayed"


class Wrong(ReplayError):
    """Raised when a feature doesn't work."""


@dataclass
class Trial:
    """Holds one way of routing on this rank: the model, its micro-batches, and the untouched step."""

    options: Options
    routing: str
    device: torch.device

    @functools.cached_property
    def chunks(self) -> list[nn.Module]:
        return build(self.options, self.routing, self.device)

    @functools.cached_property
    def parallel(self) -> ParallelLayout:
        return ParallelLayout.from_megatron(self.chunks)

    @functools.cached_property
    def batches(self) -> list[Batch]:
        return plan(self.options, self.parallel, self.device)

    @functools.cached_property
    def untouched(self) -> tuple[Outcome, list[RoutedExperts]]:
        """Return the outcome of the model without npu_replay, and the experts that its routers showed."""
        with npu_replay.observe(self.chunks) as observation:
            outcome = step(self.chunks, self.batches)
        return outcome, observation.shown

    def random_routes(self, *, holes: bool = False) -> list[RoutedExperts]:
        """Return routes that no router would choose; with `holes`, every third row has none."""
        generator = torch.Generator().manual_seed(13 + dist.get_rank())
        return [
            RoutedExperts(
                ids=torch.rand(*recorded.ids.shape[:2], recorded.num_experts, generator=generator).topk(
                    recorded.topk
                )[1],
                layers=recorded.layers,
                num_experts=recorded.num_experts,
                recorded=torch.arange(len(recorded)) % 3 != 0 if holes else None,
            )
            for recorded in self.untouched[1]
        ]


def collectives(trial: Trial) -> str:
    """Check the results of the collectives that npu_replay uses, in the groups that it uses."""
    rank = dist.get_rank()
    for group in [dist.group.WORLD, *trial.parallel.groups]:
        ranks = dist.get_process_group_ranks(group)
        total = torch.tensor([2**40 + 1, rank], device=trial.device)  # above what a float32 can count
        dist.all_reduce(total, group=group)
        data = torch.full((5,), rank % 251, dtype=torch.uint8, device=trial.device)
        dist.broadcast(data, ranks[-1], group)
        for name, wanted, seen in (
            ("all_reduce of int64", [(2**40 + 1) * len(ranks), sum(ranks)], total.tolist()),
            ("broadcast of uint8", [ranks[-1] % 251] * 5, data.tolist()),
        ):
            Wrong.unless(seen == wanted, f"{name} over {len(ranks)} ranks gave {seen}, not {wanted}")
    return "int64 summed right, bytes sent right, in every group of ranks"


def model(trial: Trial) -> str:
    """Check that the model trains without npu_replay, twice alike."""
    close = _close(
        step(trial.chunks, trial.batches), trial.untouched[0], "two runs of one step, without npu_replay, are"
    )
    return f"trains without npu_replay, twice {close}"


def record(trial: Trial) -> str:
    """Check that the recorded ids are those that the routers show, and that the step is unchanged."""
    untouched, routes = trial.untouched
    with npu_replay.record(trial.chunks) as recording:
        outcome = step(trial.chunks, trial.batches)
    count = _same(recording.routes, routes, "were recorded otherwise than the untouched step chose")
    close = _close(outcome, untouched, "a recorded step and an untouched one are")
    return f"{count} token-layers as the routers show, step {close}"


def collect(trial: Trial) -> str:
    """Check by the losses of all tokens that collected routes fit other micro-batches of the sequences."""
    with npu_replay.record(trial.chunks) as recording:
        before = step(trial.chunks, trial.batches, forward_only=True)
    layouts = [batch.layout for batch in trial.batches]
    merged = npu_replay.collect(recording, layouts, trial.parallel, patience=trial.options.patience)
    numbers = [number for batch in trial.batches for number in batch.numbers]
    samples = dict(zip(numbers, merged or [], strict=True))
    other = plan(trial.options, trial.parallel, trial.device, first=1)
    layers = trial.parallel.moe_layers
    routes = [batch.layout.gather([samples[n] for n in batch.numbers], layers=layers) for batch in other]
    with npu_replay.replay(trial.chunks, routes):
        after = step(trial.chunks, other, forward_only=True)
    ends = ": they aren't the routes of their tokens"
    _close(after, before, "replayed in other micro-batches, the collected routes give losses that are", ends)
    return f"{len(samples)} sequences have their own routes in other micro-batches too"


def replay(trial: Trial) -> str:
    """Check that the routers show the experts that they are given, and without a route their own choice.

    No token of this model looks at another, so a row doesn't depend on the routes of other rows.
    """
    routes = trial.random_routes(holes=True)
    observation = npu_replay.observe(trial.chunks)
    with observation, npu_replay.replay(trial.chunks, routes, min_overlap=0):  # no router would choose them
        step(trial.chunks, trial.batches)
    _same(observation.shown, routes, _OTHERS)
    without = [(~route.recorded).nonzero().flatten() for route in routes]
    shown, chosen = (
        [routes_there.take(rows) for routes_there, rows in zip(routes_of, without, strict=True)]
        for routes_of in (observation.shown, trial.untouched[1])
    )
    count = _same(shown, chosen, "of rows without a route show other experts than the router's own choice")
    return f"random routes show; {count} token-layers without a route are the router's own choice"


def recompute(trial: Trial) -> str:
    """Check that each recompute takes the experts of its own forward: compares the gradients."""
    routes = trial.random_routes()
    with npu_replay.replay(trial.chunks, routes, min_overlap=0):
        kept = step(trial.chunks, trial.batches)
    chunks = build(trial.options, trial.routing, trial.device, recompute=True)
    routers = routers_of(chunks)
    calls = []
    for router in routers:
        router.module.register_forward_hook(lambda *_: calls.append(1))
    observation = npu_replay.observe(chunks)
    with observation, npu_replay.replay(chunks, routes, min_overlap=0):
        again = step(chunks, trial.batches)
    _same(observation.shown, routes, _OTHERS)
    lacking = 2 * len(routers) * len(trial.batches) - len(calls)
    Wrong.unless(not lacking, f"{lacking} calls of routers were not recomputed")
    close = _close(again, kept, "gradients with recompute and without are", ", under the same routes")
    return f"each takes the routes of its own forward; gradients {close}"


def gradients(trial: Trial) -> str:
    """Check that a replay of the routers' own choice is equal to an untouched step."""
    untouched, routes = trial.untouched
    with npu_replay.replay(trial.chunks, routes):
        outcome = step(trial.chunks, trial.batches)
    close = _close(outcome, untouched, "a replay of the routers' own choice and an untouched step are")
    return f"a replay of the routers' own choice is {close}"


FEATURES: dict[str, Callable[[Trial], str]] = {
    "collectives": collectives,
    "model": model,
    "record": record,
    "collect": collect,
    "replay": replay,
    "recompute": recompute,
    "gradients": gradients,
}
"""The features, by the name in the report, in the order in which they are tried."""


def _same(ours: list[RoutedExperts], theirs: list[RoutedExperts], differ: str) -> int:
    """Return the number of token-layers; raise Wrong, «3 of 120 token-layers DIFFER», if experts differ."""
    lacking = sum(int((~routes.recorded).sum()) for routes in ours)
    Wrong.unless(not lacking, f"{lacking} rows have no route, or show fewer experts than top-k")
    seen = npu_replay.compare(ours, theirs)
    count = seen.token_layers
    Wrong.unless(not seen.differing, f"{seen.differing} of {count} token-layers {differ}")
    return count


def _close(ours: Outcome, theirs: Outcome, begins: str, ends: str = "") -> str:
    """Return how close two steps are; raise Wrong, «BEGINS 1.0e-01 apartENDS», if further than `CLOSE`."""
    apart = distance(ours, theirs)
    far = "not comparable: a loss or a gradient is missing, or not finite"
    Wrong.unless(apart <= CLOSE, f"{begins} {f'{apart:.1e} apart' if math.isfinite(apart) else far}{ends}")
    return "the same to the last bit" if apart == 0 else f"within {apart:.0e}"
