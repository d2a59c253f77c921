"""What a job's routes cost by each way, planned; its parts, measured here.

    python -m benchmarks.delivery --layers 94 --samples 8192 --tp 4 --cp 2 --pp 8 --dp 4

`--pairs 0` plans, and measures nothing. Measured is the processor's time for 50 MB of ids, more than its
caches hold: put, with 48 layers; fetched and gathered by a rank of 12 layers, from samples that lie side by
side in one copy by numpy as the yardstick; and gathered by ranks of cp2 x tp8.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from benchmarks.delivery_plan import Load, Plan, plan
from benchmarks.timing import Case, Row, Way, rows
from npu_replay import (
    DecoderLayers,
    ParallelLayout,
    RoutedExperts,
    RoutedModel,
    TokenLayout,
    delivery,
    screen,
)
from npu_replay.compat.ray import RayCarrier
from npu_replay.delivery.references import Reference, checked_cut, put_away
from npu_replay.devices import one_thread
from npu_replay.options import check_out, write_out
from npu_replay.tables import Part, Table, print_json, show

SAMPLES = 16
TOKENS = 8192
LAYERS = 48
TOPK = 8
EXPERTS = 128
CUT = ParallelLayout(pp=4, pp_rank=1, decoder=DecoderLayers(LAYERS))
Put: TypeAlias = "Callable[[Sequence[RoutedExperts]], list[Reference]]"
RANK = "and gather, all rows"
SHARE = "and gather, one of cp2 x tp8"
"""After a fetch of pieces as Ray has them."""
ONE = "gather, one of cp2 x tp8"
EVERY = "gather, all 16"
TAKEN = "take, all 16"


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
        found: list[Row] = []
        if pairs:
            seconds = 0.9 * (pairs + 2) + 5
            screen.err().write(f"Measuring takes about {seconds:.0f} s on two idle CPU cores\n")
            found = measured(pairs, screen.tell)
        result = {"planned": summary(planned), "rows": [asdict(row) for row in found]}
        if as_json:
            print_json(json.dumps(result, indent=1))
        else:
            show(_shown(planned, found))
    write_out(out, json.dumps(result, indent=1).encode(), force=force)
    return planned, found


def _shown(planned: Plan, found: list[Row]) -> Iterator[Part]:
    ranks, nodes = (
        f"{number:,} {what}{'s' * (number != 1)}"
        for number, what in ((planned.ranks, "rank"), (planned.nodes, "node"))
    )
    yield (
        f"Planned: {ranks} on {nodes}, "
        f"{planned.tokens:,} tokens a step, "
        f"{_gigabytes(planned.unique)} GB of ids"
    )
    yield table(planned)
    if not found:
        return
    yield ""
    yield f"Measured here: samples of {TOKENS:,} tokens, the processor's time, one thread"
    yield measured_table(found)
    yield from verdicts(found)


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
    return Table(("", "way", "CPU ms", "x copy", "quartiles"), lines, range(2, 5))


def verdicts(found: list[Row]) -> list[str]:
    """Which targets were met in this run."""
    times = {row.way: row.microseconds for row in found}
    ratios = {row.way: row.ratio for row in found}
    targets = (
        (f"unpickled, {RANK}", ratios[RANK], "x a copy of what it reads", 1.5),
        (f"the same, {SHARE}", ratios[SHARE], "x a copy of what it reads", 1.5),
        (ONE, ratios[ONE], "x numpy's take of its rows", 2.0),
        (EVERY, times[EVERY] / times[TAKEN], "x numpy's take of their rows", 2.0),
        (EVERY, times[EVERY] / times[ONE], "x one, for 16 x the rows", 3.0),
    )
    return [
        f"{name}: {ratio:.2f} {of}; at most {most:.1f}: {'met' if ratio <= most else 'not met'}"
        for name, ratio, of, most in targets
    ]


def measured(rounds: int, tell: Callable[[str], None]) -> list[Row]:
    """Every part, over so many rounds; `tell` is called with each."""
    with one_thread(), _joined() as there:
        carriers: dict[str, Put] = {"as over Ray": out_of_band}
        if there:
            carriers["Ray"] = RayCarrier(cut=CUT).put_all
        found: list[Row] = []
        for what, ways in (("put", puts(carriers)), ("fetch", fetches(carriers)), ("gather", gathers())):
            tell(what)
            case = Case(what, SAMPLES * TOKENS, ways, rounds, clock=time.process_time)
            found += rows(what, case.tokens, case.measure())
    return found


@contextlib.contextmanager
def _joined() -> Iterator[bool]:
    """Join the Ray that is started on this machine for the block, if there is one."""
    try:
        import ray
    except ImportError:
        yield False
        return
    if ray.is_initialized():
        yield True
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError):
        yield False
        return
    try:
        yield True
    finally:
        ray.shutdown()


def puts(carriers: dict[str, Put]) -> list[Way]:
    """Ways to put; a copy of all ids comes first."""
    routes = samples()
    ways = [Way("copy", lambda: np.concatenate([one.ids.numpy() for one in routes]))]
    return ways + [Way(name, functools.partial(put, routes)) for name, put in carriers.items()]


def fetches(carriers: dict[str, Put]) -> list[Way]:
    """Ways to fetch a stage's layers; a copy of them comes first."""
    stage = samples(SAMPLES * CUT.pp, CUT.moe_layers)
    whole, share = TokenLayout.packed([TOKENS] * len(stage)), _layout(0, len(stage))
    put = {name: each(stage) for name, each in carriers.items()}
    last = [*put.values()][-1]

    def rank(layout: TokenLayout) -> None:
        layout.gather(delivery.fetch(last, CUT), layers=CUT.moe_layers)

    ways = [Way("copy", lambda: np.concatenate([one.ids.numpy() for one in stage]))]
    ways += [Way(name, functools.partial(delivery.fetch, each, CUT)) for name, each in put.items()]
    return [*ways, Way(RANK, lambda: rank(whole)), Way(SHARE, lambda: rank(share))]


def out_of_band(routes: Sequence[RoutedExperts]) -> list[Reference]:
    """Put what Ray's store would hold: what pieces cost beside Ray's own copy, and its get."""

    def pickled(pieces: Sequence[RoutedExperts]) -> list[Any]:
        buffers: list[list[pickle.PickleBuffer]] = [[] for _ in pieces]
        return [
            (pickle.dumps(piece, 5, buffer_callback=each.append), each)
            for piece, each in zip(pieces, buffers, strict=True)
        ]

    def unpickled(handles: Sequence[Any], patience: float) -> Any:
        return [pickle.loads(data, buffers=each) for data, each in handles]

    return put_away(routes, checked_cut(CUT), pickled, unpickled)


def gathers() -> list[Way]:
    """gather of all layers by ranks of cp2 x tp8; numpy's take of one rank's rows comes first."""
    routes, layouts = samples(), [_layout(rank) for rank in range(16)]
    whole = RoutedExperts.concat(routes).ids.numpy()

    def take(layout: TokenLayout) -> None:
        np.take(whole, layout.rows.numpy(), axis=0)

    def every(do: Callable[[TokenLayout], object]) -> None:
        for layout in layouts:
            do(layout)

    def gather(layout: TokenLayout) -> None:
        layout.gather(routes)

    return [
        Way("take", lambda: take(layouts[0])),
        Way(ONE, lambda: gather(layouts[0])),
        Way(TAKEN, lambda: every(take)),
        Way(EVERY, lambda: every(gather)),
    ]


def _layout(rank: int, count: int = SAMPLES) -> TokenLayout:
    place = ParallelLayout(tp=8, tp_rank=rank % 8, cp=2, cp_rank=rank // 8, sequence_parallel=True)
    return TokenLayout.packed([TOKENS] * count, parallel=place)


@functools.cache
def samples(count: int = SAMPLES, layers: Sequence[int] = range(LAYERS)) -> list[RoutedExperts]:
    """The samples, made once."""
    generator = np.random.default_rng(0)
    return [
        RoutedExperts(
            ids=torch.from_numpy(
                generator.integers(0, EXPERTS // TOPK, (TOKENS, len(layers), TOPK), np.uint8) * TOPK
                + np.arange(TOPK, dtype=np.uint8)
            ),
            layers=layers,
            num_experts=EXPERTS,
        )
        for _ in range(count)
    ]


def _options() -> dict[str, Any]:
    """The command line, as `main` takes it."""
    reader = argparse.ArgumentParser(prog="python -m benchmarks.delivery", description=__doc__)
    reader.add_argument("--config", type=Path, help="the model's config.json, or its folder")
    for name, default, said in (
        ("layers", LAYERS, "without a config: MoE layers"),
        ("topk", TOPK, "without a config: experts a token"),
        ("experts", EXPERTS, "without a config: experts of a layer"),
        ("samples", 512, "samples of a step"),
        ("length", TOKENS, "tokens of each"),
        *((axis, 1, f"size of {axis}") for axis in ("tp", "cp", "pp", "vp", "dp")),
        ("first-stage", None, "layers of the first pipeline rank"),
        ("last-stage", None, "layers of the last"),
        ("ranks-a-node", 8, "ranks that share a node"),
        ("rollout-nodes", None, "nodes of the rollout, if they are others than the training's"),
        ("pairs", 50, "rounds to take the median of; 0: plan alone"),
    ):
        reader.add_argument(f"--{name}", type=int, default=default, metavar="N", help=said)
    reader.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")
    reader.add_argument("--out", type=Path, help="write it there, too")
    reader.add_argument("--force", action="store_true", help="overwrite what is there")
    given = vars(reader.parse_args())
    layers, topk, experts, config = (given.pop(name) for name in ("layers", "topk", "experts", "config"))
    model = (
        RoutedModel.from_config(config)
        if config is not None
        else RoutedModel(layers=tuple(range(layers)), num_layers=layers, num_experts=experts, topk=topk)
    )
    return given | {
        "model": model,
        "parallel": {axis: given.pop(axis) for axis in ("tp", "cp", "pp", "vp", "dp")},
        "stages": {name: given.pop(name) for name in ("first_stage", "last_stage")},
    }


if __name__ == "__main__":
    main(**_options())
