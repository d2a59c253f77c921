"""python -m benchmarks: what record, replay and layouts cost, as ratios within one run.

A table shows the median of the rounds' ratios to the first way, and the quartiles beside it.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import capture, cases, decode, gather, host, imports
from benchmarks.timing import Row
from npu_replay import screen
from npu_replay.compat import probe
from npu_replay.devices import megatron_on, name_of, one_thread, pick
from npu_replay.options import check_out, write_out
from npu_replay.smoke import megatron_model
from npu_replay.tables import Part, Table, print_json, show


def main(
    *,
    device: str,
    pairs: int,
    out: Path | None,
    force: bool,
    only: Sequence[str] = (),
    quick: bool = False,
    as_json: bool = False,
) -> list[Row]:
    """Measure and print a table a subject, or JSON; and write JSON to `out` if it is given.

    Args:
        pairs: rounds of the quick cases.
        only: subjects; without any all of them.
        quick: leave out the large sizes.
    """
    probe.require(probe.MEGATRON, "python -m benchmarks")
    check_out(out, force=force)
    with screen.quiet("bench"):
        where = pick(device)
        wanted = [part for part in cases.parts(where, pairs, quick=quick) if not only or part.subject in only]
        seconds = sum(part.seconds for part in wanted)
        screen.err().write(f"Measuring takes about {_rounded(seconds)} on two idle CPU cores\n")
        begun = time.perf_counter()
        about, found = measured(where, wanted, screen.tell)
        screen.err().write(f"Measured in {time.perf_counter() - begun:.0f} s\n")
        result = {"about": about, "rows": [asdict(row) for row in found]}
        if as_json:
            print_json(json.dumps(result, indent=1))
        else:
            show(_shown(about, found))
    write_out(out, json.dumps(result, indent=1).encode(), force=force)
    return found


def _rounded(seconds: float) -> str:
    """
    >>> _rounded(43), _rounded(191)
    ('40 s', '3 min')
    """
    return f"{max(1, round(seconds / 60))} min" if seconds > 90 else f"{max(5, round(seconds, -1)):.0f} s"


def measured(
    device: torch.device, wanted: Sequence[cases.Part], tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[Row]]:
    """Return what was measured on, and all rows; `tell` is called with what is measured next."""
    found: list[Row] = []
    with one_thread(), megatron_on(device):
        megatron_model.start(device)
        for part in wanted:
            tell(part.title)
            found += part.measure()
        import megatron.core

        about = {
            "device": name_of(device) or "CPU",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
            "router": cases.ROUTER,
            "step": cases.STEP,
        }
    return about, found


def _shown(about: dict[str, Any], found: list[Row]) -> Iterator[Part]:
    yield (
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, "
        f"Megatron-core {about['megatron-core']}"
    )
    for what, group in itertools.groupby(found, key=lambda row: row.what):
        mine = list(group)
        yield from ("", what)
        yield from _words(what, about, mine)
        yield _table(mine)


def _words(what: str, about: dict[str, Any], mine: list[Row]) -> Iterator[str]:
    """What was measured, and what else is known of it."""
    router = about["router"]
    step = about["step"]
    words: dict[str, Callable[[], str]] = {
        "router": lambda: (
            f"hidden {router['hidden_size']}, top-{router['moe_router_topk']} of "
            f"{router['num_moe_experts']}; forward with grad, inside an open block"
        ),
        "host": lambda: host.over_least(mine),
        "checked": lambda: (
            f"the {host.ROUTERS} routers in micro-batches 1 and 2, whose whole effect is checked"
        ),
        "recompute": lambda: f"{host.ROUTERS} routers, each in a checkpoint: forward and backward",
        "micro-batch": lambda: "the two hooks of a block on a model of 48 routers, all together",
        "other top-k": lambda: "one of torch's that is no routing",
        "wrapper": lambda: "a method of a product's class that npu_replay has wrapped, while it is off",
        "gather": gather.sizes,
        "decode": lambda: decode.sizes({row.way: row.microseconds for row in mine}),
        "capture": capture.sizes,
        "step": lambda: (
            f"{step['num_layers']} layers, hidden {step['hidden_size']}, top-{step['moe_router_topk']} of "
            f"{step['num_moe_experts']}; forward, backward, block opened and closed"
        ),
        "open and close": lambda: "a block without a forward, by one walk of the model's modules",
        "inputs": lambda: "the tokens of a micro-batch, held against the routes, by its forward",
        "overlap": lambda: "the first micro-batch of a replay, held against the routers' own choice",
        "layout": lambda: "the rows of a micro-batch, read off its preprocessing, by its forward",
        "import": lambda: imports.least({row.way: row.over_least for row in mine if row.over}),
    }
    yield words[what.split(",")[0]]()


def _table(mine: list[Row]) -> Table:
    sizes = {row.tokens for row in mine}
    lines: list[tuple[str, ...]] = []
    for tokens, group in itertools.groupby(mine, key=lambda row: row.tokens):
        for number, row in enumerate(group):
            size = (f"{tokens:,}" if not number else "",) if len(sizes) > 1 else ()
            over = (_figure(row.over, "+"), f"{row.ratio:.2f}", f"{row.ratio_low:.2f}-{row.ratio_high:.2f}")
            waits = () if row.waits is None else (f"{row.waits}",)
            lines.append((*size, row.way, _figure(row.microseconds), *(over if number else [""] * 3), *waits))
    titles = (*(["tokens"] if len(sizes) > 1 else []), "way", "µs a call", "over base", "x base", "quartiles")
    first = len(titles) - 4
    if mine[0].waits is not None:
        titles = (*titles, "waits")
    return Table(titles, lines, numbers=range(first, len(titles)))


def _figure(microseconds: float, sign: str = "") -> str:
    return f"{microseconds:{sign},.{0 if abs(microseconds) >= 10 else 2}f}"
