"""The ways of splitting a job that are tried, and what is held against one process for each.

One process alone runs `reference` first, and leaves what it found in the folder REFERENCES. Then each rank
of a job runs the CASES (tests/case_jobs.py).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import npu_replay
from case_jobs import shared_folder
from npu_replay import RoutedExperts, TokenLayout, delivery
from piece_files import FileCarrier
from zoo import gpt_split as pm
from zoo import hybrid

REFERENCES = "PARALLEL_REFERENCES"
"""The variable that says where one process alone has left what it found."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "kept": {},
    "full": FULL,
    "block": FULL | {"recompute_method": "block"},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
}
BOTH = ("kept", "full")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of splitting the job.

    Attributes:
        split: the sizes of the parallel axes.
        moe: moe_layer_freq; of a HybridModel its Hugging Face config's.
        pattern: of a HybridModel; empty for a GPTModel.
        config: more of Megatron's config.
        packed: sequences one after the other (thd) instead of a padded batch.
        even: all micro-batches padded to one length, as pipelines and the allgather dispatcher need it.
        recompute: names of RECOMPUTE.
        needs: a module of Megatron without which the case can't be.
    """

    split: pm.Split
    moe: tuple[int, ...] = pm.EVERY
    pattern: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    even: bool = False
    recompute: tuple[str, ...] = BOTH
    needs: str = "megatron.core"

    @property
    def gathers(self) -> bool:
        return self.config.get("moe_token_dispatcher_type") == "alltoall_seq"


NEMOTRON = (0, 1, 0, 0, 1, 0, 0, 1)
"""Of a config that counts each symbol of a pattern."""
_LEGACY = "megatron.core.transformer.moe.legacy_a2a_token_dispatcher"
SPLITS: dict[int, dict[str, Case]] = {
    2: {
        "tp2": Case(split=pm.Split(tp=2, etp=2)),
        "tp2-alltoall_seq": Case(
            split=pm.Split(tp=2, etp=2), config={"moe_token_dispatcher_type": "alltoall_seq"}, needs=_LEGACY
        ),
        "tp2-packed": Case(split=pm.Split(tp=2, etp=2), packed=True),
        "cp2": Case(split=pm.Split(cp=2)),
        "cp2-packed": Case(split=pm.Split(cp=2), packed=True),
        "ep2": Case(split=pm.Split(ep=2)),
        "ep2-allgather": Case(
            split=pm.Split(ep=2), config={"moe_token_dispatcher_type": "allgather"}, even=True
        ),
        "dp2": Case(split=pm.Split()),
        "pp2": Case(split=pm.Split(pp=2), even=True, recompute=tuple(RECOMPUTE)),
        "pp2-dense-stage": Case(split=pm.Split(pp=2), moe=(0, 0, 1, 1), even=True),
        "pp2-vp2": Case(split=pm.Split(pp=2, vp=2), even=True),
        "pp2-vp2-dense-chunk": Case(split=pm.Split(pp=2, vp=2), moe=(0, 1, 1, 1), even=True),
        "tp2-ep2": Case(split=pm.Split(tp=2, ep=2)),
        "hybrid-cp2": Case(split=pm.Split(cp=2), pattern="*E*E*E*E"),
        "hybrid-cp2-packed": Case(split=pm.Split(cp=2), packed=True, pattern="*E*E*E*E"),
        "hybrid-ep2": Case(split=pm.Split(ep=2), pattern="*E*E*E*E", recompute=("full", "selective")),
        "hybrid-pp2": Case(split=pm.Split(pp=2), even=True, pattern="*E*E*E*E", recompute=("kept",)),
        "hybrid-pp2-uneven": Case(split=pm.Split(pp=2), even=True, pattern="*E*|E*E*E"),
        "hybrid-pp2-vp2": Case(split=pm.Split(pp=2, vp=2), even=True, pattern="*E|*E|*E|*E"),
        "hybrid-pp2-dense-stage": Case(
            split=pm.Split(pp=2), moe=(0, 0, 1, 1), even=True, pattern="*-*-|*E*E", recompute=("full",)
        ),
        "hybrid-pp2-nemotron": Case(split=pm.Split(pp=2), moe=NEMOTRON, even=True, pattern="MEM*E|-ME"),
        "hybrid-tp2": Case(
            split=pm.Split(tp=2, etp=2), pattern="*-*E*E*E", moe=(0, 1, 1, 1), recompute=("full",)
        ),
    },
    4: {
        "tp2-etp2-ep2": Case(split=pm.Split(tp=2, etp=2, ep=2)),
        "tp2-cp2": Case(split=pm.Split(tp=2, etp=2, cp=2), recompute=("full",)),
        "tp2-cp2-packed": Case(split=pm.Split(tp=2, etp=2, cp=2), packed=True, recompute=("full",)),
        "tp2-pp2": Case(split=pm.Split(tp=2, etp=2, pp=2), even=True),
        "pp2-vp2-ep2": Case(split=pm.Split(pp=2, vp=2, ep=2), even=True),
        "hybrid-tp2-pp2": Case(split=pm.Split(tp=2, etp=2, pp=2), even=True, pattern="*E*E|*E*E"),
    },
}


def missing(case: Case) -> str:
    """Why this release of Megatron can't run the case; empty if it can."""
    if case.pattern:
        return hybrid.missing(case.pattern)
    return "" if importlib.util.find_spec(case.needs) else f"this release has no {case.needs}"


# One process alone


def reference(task: dict[str, Any]) -> None:
    """What a job of one process finds, for each moe_layer_freq or pattern of "cases"; stages don't matter."""
    dist.init_process_group("gloo")
    known = {
        (case.moe, hybrid.symbols(case.pattern)) for case in (CASES[name].args[0] for name in task["cases"])
    }
    with npu_replay.compat.cpu.lend():
        for moe, pattern in known:
            if not (pattern and hybrid.missing(pattern)):
                case = Case(split=pm.Split().start(), moe=moe, pattern=pattern)
                torch.save(_alone(case), Path(task["references"], reference_name(case)))
    dist.destroy_process_group()


def _alone(case: Case) -> dict[str, Any]:
    chunks = pm.build(case.split, case.moe, case.pattern)
    weights = pm.initial(chunks)
    job = Job(case, case.split, chunks, weights)
    pm.load(chunks, case.split, weights)
    reference: dict[str, Any] = {"weights": weights}
    with npu_replay.record(chunks) as recording:
        reference["live"] = job.train(job.plan())
    reference["recorded"] = [sequence.ids for sequence in job.scattered(recording.routes)]
    reference["foreign"] = job.replayed(foreign_routes(tuple(pm.routers(chunks))), job.plan())
    pm.load(chunks, case.split, pm.other_routers(weights))
    reference["round trip"] = job.replayed(job.scattered(recording.routes), job.plan())
    return reference


def reference_name(case: Case) -> str:
    return f"reference-{''.join(map(str, case.moe))}{hybrid.symbols(case.pattern).replace('*', 'A')}.pt"


def foreign_routes(layers: Sequence[int]) -> list[RoutedExperts]:
    """Routes that no router would choose; every second sequence has none for its last token."""
    generator = torch.Generator().manual_seed(13)
    routes = []
    for number, tokens in enumerate(pm.SEQUENCES):
        size = len(tokens) - number % 2
        chances = torch.rand(size, max(pm.LAYERS, max(layers) + 1), pm.EXPERTS, generator=generator)
        ids = chances.argsort(-1)[:, list(layers), : pm.TOPK]
        routes.append(RoutedExperts(ids=ids, layers=layers, num_experts=pm.EXPERTS))
    return routes


def _fingerprints(numbers: Sequence[int]) -> list[int]:
    return [npu_replay.fingerprint(pm.SEQUENCES[number]) for number in numbers]


# One process of several

Outcome = tuple[float, pm.Tensors]
"""The loss and the gradients of the whole model."""


class Job:
    """A case on this rank: its chunks, and the micro-batches that it gets."""

    def __init__(
        self,
        case: Case,
        split: pm.Split,
        chunks: list[nn.Module],
        weights: pm.Tensors,
        parallel: Any = None,
    ) -> None:
        self.case = case
        self.split = split
        self.chunks = chunks
        self.weights = weights
        self.parallel = parallel

    def plan(self, *, other: bool = False) -> list[pm.Batch]:
        """This rank's micro-batches; `other` cuts and orders the same sequences another way."""
        count = len(pm.SEQUENCES)
        dp = self.split.dp
        rank = self.split.ranks["dp"]
        mine = list(range(count))[rank::dp]
        if other:
            mine = list(range(count))[::-1][rank * count // dp : (rank + 1) * count // dp]
        if self.split.pp > 1:  # all micro-batches alike, and at least four
            size = (4 if other else 2) // dp
            parts = [mine[first : first + size] for first in range(0, len(mine), size)]
        else:
            cut = 3 // dp if other else 4 // dp
            parts = [mine[:cut], mine[cut:]]
        longest = (16 if other else 12) if self.case.even else None
        return [
            pm.batch(
                part,
                self.split,
                align=1 if self.parallel is None else self.parallel.alignment(),
                longest=longest,
                packed=self.case.packed,
                gathers=self.case.gathers,
            )
            for part in parts
        ]

    def layout(self, batch: pm.Batch) -> TokenLayout:
        options: dict[str, Any] = {"fingerprints": _fingerprints(batch.numbers)}
        if self.parallel is not None:
            options["parallel"] = self.parallel
        if self.case.packed:
            return TokenLayout.packed(batch.lengths, **options)
        return TokenLayout.padded(batch.lengths, batch.length[0] if self.case.even else None, **options)

    def train(self, batches: Sequence[pm.Batch]) -> Outcome:
        loss = pm.step(self.chunks, self.split, batches)
        return loss, pm.gradients(self.chunks, self.split, self.weights)

    def replayed(self, sequences: Sequence[RoutedExperts], batches: Sequence[pm.Batch]) -> Outcome:
        """Train with these routes, one a sequence of the whole job."""
        with npu_replay.replay(self.chunks, [self.routes(sequences, batch) for batch in batches]):
            return self.train(batches)

    def routes(self, sequences: Sequence[RoutedExperts], batch: pm.Batch) -> RoutedExperts:
        here = [sequences[number] for number in batch.numbers]
        if self.parallel is None:
            return self.layout(batch).gather(here)
        return self.layout(batch).gather(here, layers=self.parallel.moe_layers)

    def scattered(self, routes: Sequence[RoutedExperts]) -> list[RoutedExperts]:
        """One RoutedExperts a sequence, of a job of one process."""
        batches = self.plan()
        parts = [
            self.layout(batch).scatter(batch_routes)
            for batch, batch_routes in zip(batches, routes, strict=True)
        ]
        return [sequence for part in parts for sequence in part]


def run(case: Case, recompute: str) -> None:
    """A case on this rank: it trains, is recorded and replayed as one process alone."""
    if missing(case):
        return
    split = case.split.start()
    reference = torch.load(Path(os.environ[REFERENCES], reference_name(case)))
    chunks = pm.build(split, case.moe, case.pattern, **case.config, **RECOMPUTE[recompute])
    job = Job(case, split, chunks, reference["weights"], npu_replay.ParallelLayout.from_megatron(chunks))
    pm.load(chunks, split, reference["weights"])
    plain = job.train(job.plan())
    _same(plain, reference["live"])
    _check_layout(job)
    recorded = _record(job, plain, reference["recorded"])
    _replay(job, reference["foreign"])
    pm.load(chunks, split, pm.other_routers(reference["weights"]))
    _same(job.replayed(_everyones(recorded, job), job.plan(other=True)), reference["round trip"])


CASES = {
    f"{name}-{recompute}": partial(run, case, recompute)
    for cases in SPLITS.values()
    for name, case in cases.items()
    for recompute in case.recompute
}


def prepare() -> None:
    """What case_jobs.py asks of a module of cases: these lend nothing more."""


def _check_layout(job: Job) -> None:
    split = job.split
    parallel = job.parallel
    for axis in ("tp", "cp", "pp", "ep", "etp", "dp"):
        assert (axis, getattr(parallel, axis)) == (axis, getattr(split, axis))
        assert (axis, getattr(parallel, f"{axis}_rank")) == (axis, split.ranks[axis])
    assert parallel.vp == split.vp
    if not job.case.pattern:  # of a HybridModel only those with experts have a number in both
        numbers = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in job.chunks]
        assert [list(layers) for layers in parallel.chunk_layers] == numbers
    assert [[layer for layer in layers if job.case.moe[layer]] for layers in parallel.chunk_layers] == [
        list(pm.routers([chunk])) for chunk in job.chunks
    ]
    assert list(parallel.moe_layers) == sorted(pm.routers(job.chunks))
    parallel.check(job.chunks)
    for batch in [*job.plan(), *job.plan(other=True)]:
        firsts = [sum(batch.lengths[:at]) for at in range(len(batch.numbers))]
        first = dict(zip(batch.numbers, firsts, strict=True))
        rows = [-1 if token is None else first[token[0]] + token[1] for token in batch.routed]
        assert job.layout(batch).rows.tolist() == rows
        assert TokenLayout.from_probe(batch.fed, batch.lengths, parallel=parallel).rows.tolist() == rows


def _record(job: Job, plain: Outcome, wanted: Sequence[torch.Tensor]) -> list[RoutedExperts]:
    batches = job.plan()
    layouts = [job.layout(batch) for batch in batches]
    with npu_replay.record(job.chunks) as recording:
        trained = job.train(batches)
    _same(trained, plain, within=0.0)
    recorded = npu_replay.collect(recording, layouts, job.parallel)
    with npu_replay.record(job.chunks) as recording:
        pm.step(job.chunks, job.split, batches, forward_only=True)
    forward_only = npu_replay.collect(recording.routes, layouts, job.parallel)
    layers = [layer for layer, is_moe in enumerate(job.case.moe) if is_moe]
    numbers = [number for batch in batches for number in batch.numbers]
    expected = [
        RoutedExperts(ids=wanted[number], layers=layers, num_experts=pm.EXPERTS, fingerprint=fingerprint)
        for number, fingerprint in zip(numbers, _fingerprints(numbers), strict=True)
    ]
    assert recorded == expected
    assert forward_only == expected
    return expected


def _replay(job: Job, wanted: Outcome) -> None:
    layers = [layer for layer, is_moe in enumerate(job.case.moe) if is_moe]
    foreign = foreign_routes(layers)
    batches = job.plan()
    fetched = _by_reference(foreign, job)
    for batch in batches:
        ours = job.routes(fetched, batch)
        theirs = job.routes(foreign, batch)
        assert ours == theirs or not job.parallel.moe_layers, "a rank of dense layers is sent nothing"
        assert (ours.layers, ours.ids.shape) == (theirs.layers, theirs.ids.shape)
    with pm.witnessed(job.chunks) as shown_by_layer:
        outcome = job.replayed(fetched, batches)
    _same(outcome, wanted)
    for layer, maps in shown_by_layer.items():
        for batch, shown in zip(batches, maps, strict=True):
            _check_shown(shown, batch, layer, foreign)


def _by_reference(sequences: Sequence[RoutedExperts], job: Job) -> list[RoutedExperts]:
    """What this rank fetches of sequences that the first rank puts into a folder: in its own layers."""
    folder = Path(shared_folder())
    references: list[Any] = [None]
    if dist.get_rank() == 0:
        references = [FileCarrier(folder, cut=job.parallel).put_all(sequences)]
    dist.broadcast_object_list(references)
    fetched = [routes for routes in delivery.fetch(references[0], job.parallel) if routes is not None]
    assert {routes.layers for routes in fetched} == {job.parallel.moe_layers}
    return fetched


def _check_shown(
    shown: torch.Tensor, batch: pm.Batch, layer: int, sequences: Sequence[RoutedExperts]
) -> None:
    """Every row of a router's map [rows, experts] shows what its token's route says."""
    assert len(shown) == len(batch.routed)
    for row, token in enumerate(batch.routed):
        if token is None or token[1] >= len(sequences[token[0]]):
            assert int(shown[row].sum()) == pm.TOPK  # the router's own choice
            continue
        ids = sequences[token[0]].layer_ids(layer)[token[1]].tolist()
        assert shown[row].nonzero()[:, 0].tolist() == sorted(ids), f"layer {layer}, row {row}, token {token}"


def _everyones(mine: Sequence[RoutedExperts], job: Job) -> list[RoutedExperts]:
    """The routes of all sequences; data-parallel ranks have collected each their own."""
    numbers = [number for batch in job.plan() for number in batch.numbers]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {n: sequence.to_bytes() for n, sequence in zip(numbers, mine, strict=True)})
    merged = {number: data for part in parts for number, data in part.items()}
    return [RoutedExperts.from_bytes(merged[number]) for number in range(len(pm.SEQUENCES))]


def _same(ours: Outcome, theirs: Outcome, *, within: float = 1e-5) -> None:
    """Losses and gradients agree, relative to the largest gradient of each weight."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=within, atol=0.0)
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(
            ours[1][name],
            gradient,
            rtol=0.0,
            atol=within * max(float(gradient.abs().max()), 1e-3),
            msg=lambda message, name=name: f"{name}: {message}",  # type: ignore[misc]
        )
