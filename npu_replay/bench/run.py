"""npu-replay bench: what record, replay and layouts cost, as ratios within one run.

The table shows the median of the rounds' ratios to the first way, and the quartiles beside it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from npu_replay.bench import capture, cases, decode, gather, imports
from npu_replay.bench.timing import Row, rows
from npu_replay.compat import probe
from npu_replay.devices import megatron_on, name_of, one_thread, pick
from npu_replay.routes.atomic_file import check_place, write_whole
from npu_replay.tables import Table, terminal


def main(*, device: str, pairs: int, out: Path | None, force: bool) -> list[Row]:
    """Measure, print the table, and write it to `out` as JSON if one is given."""
    probe.require(probe.MEGATRON, "npu-replay bench")
    if out is not None:
        check_place(out, overwrite=force)
    from rich.progress import Progress

    console = terminal()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        about, found = measured(pick(device), pairs, lambda title: bar.update(task, description=title))
    console.print(_heading(about), soft_wrap=True)
    console.print(_table(found))
    console.print(
        gather.sizes(),
        capture.sizes(),
        decode.sizes({row.way: row.microseconds for row in found if row.what == "decode"}),
        imports.least({row.way: row.over_least for row in found if row.what == "import" and row.over}),
        sep="\n",
        soft_wrap=True,
    )
    if out is not None:
        result = {"about": about, "rows": [asdict(row) for row in found]}
        write_whole(out, json.dumps(result, indent=1).encode(), overwrite=force)
        console.print(f"Wrote {out}", soft_wrap=True)
    return found


def measured(
    device: torch.device, pairs: int, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[Row]]:
    """What was measured on, and all rows.

    Args:
        device: where the model's cases run.
        pairs: rounds of the quick cases.
        tell: called with what is measured next.
    """
    found: list[Row] = []
    with one_thread(), megatron_on(device):
        for case in cases.cases(device, pairs):
            tell(f"{case.what}, {case.tokens:,} tokens")
            found += rows(case.what, case.tokens, case.measure())
        tell("import")
        found += rows("import", 0, imports.times(max(3, pairs // 5)))
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


def _heading(about: dict[str, Any]) -> str:
    router, step = about["router"], about["step"]
    return (
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, "
        f"Megatron-core {about['megatron-core']}\n"
        f"router: hidden {router['hidden_size']}, top-{router['moe_router_topk']} of "
        f"{router['num_moe_experts']}; forward with grad, inside an open block\n"
        f"step: {step['num_layers']} layers, hidden {step['hidden_size']}, top-{step['moe_router_topk']} of "
        f"{step['num_moe_experts']}; forward, backward, block opened and closed"
    )


def _table(found: list[Row]) -> Table:
    lines: list[tuple[str, ...]] = []
    for (what, tokens), group in itertools.groupby(found, key=lambda row: (row.what, row.tokens)):
        first, *others = group
        lines.append(
            (what, f"{tokens:,}" if tokens else "", first.way, _figure(first.microseconds), *[""] * 3)
        )
        for row in others:
            against = f"{row.ratio:.2f}", f"{row.ratio_low:.2f}-{row.ratio_high:.2f}"
            lines.append(("", "", row.way, _figure(row.microseconds), _figure(row.over, "+"), *against))
        lines.append(())
    titles = ("", "tokens", "way", "µs a call", "over base", "x base", "quartiles")
    return Table(titles, lines[:-1], numbers=range(3, 7), ruled=True)


def _figure(microseconds: float, sign: str = "") -> str:
    return f"{microseconds:{sign},.{0 if abs(microseconds) >= 10 else 2}f}"
