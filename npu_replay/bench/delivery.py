"""npu-replay bench --delivery: what a job's routes cost by each way, planned; its parts, measured here.

Measured are 16 samples of 8k tokens, 48 layers, top-8 of 128: put whole, fetched by a rank with a quarter of
the layers, and gathered by ranks of cp2 x tp8. The yardstick is a copy of the same bytes by numpy.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_replay import (
    DecoderLayers,
    ParallelLayout,
    RoutedExperts,
    RoutedModel,
    TokenLayout,
    delivery,
    screen,
)
from npu_replay.bench.timing import Case, Row, Way, rows
from npu_replay.compat import ray
from npu_replay.delivery.plan import Load, Plan, plan
from npu_replay.delivery.references import seal
from npu_replay.devices import one_thread
from npu_replay.options import check_out, write_out
from npu_replay.tables import Cell, Part, Table, print_json, show, to_json

SAMPLES, TOKENS = 16, 8192
LAYERS, TOPK, EXPERTS = 48, 8, 128
CUT = ParallelLayout(pp=4, pp_rank=1, decoder=DecoderLayers(LAYERS))
TARGETS = (
    ("a rank's fetch and gather", 1.5, "x a copy of the bytes it needs"),
    ("gather, one of cp2 x tp8", 2.0, "x numpy's take of its rows"),
    ("gather, all 16 of one process", 3.0, "x one, for 16 x the rows"),
)


def main(
    *,
    model: RoutedModel,
    parallel: Mapping[str, Any],
    stages: Mapping[str, Any],
    samples: int,
    length: int,
    ranks_a_node: int,
    rollout_nodes: int | None,
    pairs: int,
    out: Path | None,
    force: bool,
    as_json: bool = False,
) -> tuple[Plan, list[Row]]:
    """Plan, measure, print both, and write them to `out` as JSON if one is given.

    Args:
        parallel: sizes of tp, cp, pp, vp and dp.
        stages: first_stage and last_stage of DecoderLayers.
        samples, length: of a step; each has so many tokens.
    """
    check_out(out, force=force)
    moe = [int(layer in model.layers) for layer in range(model.num_layers)]
    decoder = DecoderLayers(model.num_layers, moe_layer_freq=moe, **stages)
    planned = plan(
        ParallelLayout(**parallel, decoder=decoder),
        [length] * samples,
        topk=model.topk,
        num_experts=model.num_experts,
        ranks_a_node=ranks_a_node,
        rollout_nodes=rollout_nodes,
    )
    with screen.quiet("bench"):
        screen.err().write(f"Measuring takes about {0.9 * (pairs + 2) + 5:.0f} s on two idle CPU cores\n")
        with screen.progress(3) as tell:
            found = measured(pairs, tell)
        result = {"planned": summary(planned), "rows": [asdict(row) for row in found]}
        if as_json:
            print_json(result)
        else:
            show(_shown(planned, found))
    write_out(out, to_json(result).encode(), force=force)
    return planned, found


def _shown(planned: Plan, found: list[Row]) -> Iterator[Part]:
    yield (
        f"Planned: {_counted(planned.ranks, 'rank')} on {_counted(planned.nodes, 'node')}, "
        f"{planned.tokens:,} tokens a step, "
        f"{_gigabytes(planned.unique)} GB of ids"
    )
    yield table(planned)
    yield ""
    yield f"Measured here: {SAMPLES} samples of {TOKENS:,} tokens, {LAYERS} layers, one thread"
    yield measured_table(found)
    yield from verdicts(found)


def _counted(number: int, what: str) -> str:
    """
    >>> _counted(1, "rank"), _counted(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def summary(planned: Plan) -> dict[str, Any]:
    """The figures of the table, in bytes."""
    return {
        "ranks": planned.ranks,
        "nodes": planned.nodes,
        "unique": planned.unique,
        **{load.way: figures(load) for load in planned.loads},
    }


def figures(load: Load) -> dict[str, int]:
    """What the table has of one way: the busiest of all ranks and nodes."""
    return {
        "between nodes": load.sent,
        "out of the busiest node": load.busiest,
        "to the driver first": load.collected,
        "held by a node": int(load.node_held.max()),
        "of that its ranks' own, a rank": int(load.own.max()),
        "held by a node that sends": load.put_held,
        "read by a rank": int(load.read.max()),
        "reads of a rank": int(load.reads.max()),
    }


def table(planned: Plan) -> Table:
    """The plan: a column a way, in GB."""
    ways = [figures(load) for load in planned.loads]
    lines = [
        (name, *(f"{way[name]:,}" if name.startswith("reads") else _gigabytes(way[name]) for way in ways))
        for name in ways[0]
    ]
    return Table(("GB a step", *(load.way for load in planned.loads)), lines, range(1, 4))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.{0 if count >= 1e11 else 1 if count >= 1e10 else 2}f}"


def measured_table(found: list[Row]) -> Table:
    """Times, as ratios to the copy of the same rounds."""
    lines = [
        (row.what, row.way, f"{row.microseconds / 1e3:,.2f}", f"{row.ratio:.2f}",
         f"{row.ratio_low:.2f}-{row.ratio_high:.2f}")
        for row in found
    ]  # fmt: skip
    return Table(("", "way", "ms", "x copy", "quartiles"), lines, range(2, 5))


def verdicts(found: list[Row]) -> list[Cell]:
    """Which targets were met in this run."""
    ratios = {row.way: row.ratio for row in found}
    one, every = ratios[TARGETS[1][0]], ratios[TARGETS[2][0]]
    got = [ratios[TARGETS[0][0]], one, every / one]
    return [
        f"{name}: {ratio:.2f} {of}; at most {most:.1f}: {'met' if ratio <= most else 'not met'}"
        for (name, most, of), ratio in zip(TARGETS, got, strict=True)
    ]


def measured(rounds: int, tell: Callable[[str], None]) -> list[Row]:
    """Every part, over so many rounds; `tell` is called with each."""
    with one_thread(), tempfile.TemporaryDirectory() as folder, _carriers(folder) as carriers:
        found: list[Row] = []
        for what, ways in (("put", puts(carriers)), ("fetch", fetches(carriers)), ("gather", gathers())):
            tell(what)
            case = Case(what, SAMPLES * TOKENS, ways, rounds)
            found += rows(what, case.tokens, case.measure())
    return found


@contextlib.contextmanager
def _carriers(folder: str) -> Iterator[dict[str, delivery.Carrier]]:
    found: dict[str, delivery.Carrier] = {"process": delivery.ProcessCarrier(cut=CUT)}
    with contextlib.suppress(ImportError):
        found["folder"] = delivery.FolderCarrier(folder, cut=CUT)
    with ray.joined() as there:
        if there:
            found["Ray"] = ray.RayCarrier(cut=CUT)
        yield found


def puts(carriers: dict[str, delivery.Carrier]) -> list[Way]:
    """Ways to put; a copy of all ids comes first."""
    routes = samples()

    def put(carrier: delivery.Carrier) -> None:
        delivery.free(carrier.put_all(routes))

    ways = [Way("copy", lambda: [one.ids.numpy().copy() for one in routes])]
    ways.append(Way("seal", lambda: [seal(one) for one in routes]))
    return ways + [Way(name, functools.partial(put, carrier)) for name, carrier in carriers.items()]


def fetches(carriers: dict[str, delivery.Carrier]) -> list[Way]:
    """Ways to fetch a stage's layers; a copy of them comes first."""
    pieces = [one.only(CUT.moe_layers) for one in samples()]
    layout = TokenLayout.packed([TOKENS] * SAMPLES)
    put = {name: carrier.put_all(samples()) for name, carrier in carriers.items()}
    best = put.get("Ray", put["process"])

    def rank() -> None:
        layout.gather(delivery.fetch(best, CUT), layers=CUT.moe_layers)

    ways = [Way("copy", lambda: [one.ids.numpy().copy() for one in pieces])]
    for name, references in put.items():
        ways.append(Way(name, functools.partial(delivery.fetch, references, CUT)))
    return [*ways, Way(TARGETS[0][0], rank)]


def gathers() -> list[Way]:
    """gather of all layers by ranks of cp2 x tp8; numpy's take of one rank's rows comes first."""
    routes, layouts = samples(), [_layout(rank) for rank in range(16)]
    whole = RoutedExperts.concat(routes).ids.numpy()
    here = layouts[0].rows.numpy()

    def every() -> None:
        for layout in layouts:
            layout.gather(routes)

    return [
        Way("take", lambda: np.take(whole, here, axis=0)),
        Way(TARGETS[1][0], lambda: layouts[0].gather(routes)),
        Way(TARGETS[2][0], every),
    ]


def _layout(rank: int) -> TokenLayout:
    place = ParallelLayout(tp=8, tp_rank=rank % 8, cp=2, cp_rank=rank // 8, sequence_parallel=True)
    return TokenLayout.packed([TOKENS] * SAMPLES, parallel=place)


@functools.cache
def samples() -> list[RoutedExperts]:
    """The samples, made once."""
    generator = np.random.default_rng(0)
    return [
        RoutedExperts(
            ids=torch.from_numpy(
                generator.integers(0, EXPERTS // TOPK, (TOKENS, LAYERS, TOPK), np.uint8) * TOPK
                + np.arange(TOPK, dtype=np.uint8)
            ),
            layers=range(LAYERS),
            num_experts=EXPERTS,
        )
        for _ in range(SAMPLES)
    ]
