"""What `npu-replay inspect` prints: lines, the table of loads, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator

from npu_replay.inspection.inspection import Inspection
from npu_replay.tables import Cell, Part, Table

_REFUSED = 20
"""So many refused sequences are named one by one."""


def parts(found: Inspection) -> Iterator[Part]:
    """The heading, the load of each layer, what couldn't be checked, and the verdict."""
    yield [(f"{found.path}: ", "bold"), found.what]
    yield from _sizes(found)
    if found.layers:
        yield ""
        yield _table(found)
        yield ""
    for words in found.unchecked:
        yield f"not checked: {words}", "dim"
    yield from _verdict(found)


def _sizes(found: Inspection) -> Iterator[Part]:
    seen = [verdict for verdict in found.verdicts if verdict.layers]
    if not seen:
        return
    first = seen[0]
    tokens, rows, size = (sum(getattr(one, name) for one in seen) for name in ("tokens", "rows", "nbytes"))
    several = f"{len(seen):,} sequences, " if len(seen) > 1 else ""
    model = f"top-{first.topk} of {found.num_experts} experts in {first.layers} layers"
    yield f"{several}{tokens:,} tokens, {rows:,} with a route; {model}; {first.dtype}, {size:,} bytes"
    if len(seen) == 1 and first.facts:
        yield ", ".join(first.facts)


def _table(found: Inspection) -> Table:
    experts = found.num_experts
    titles = (
        "Layer",
        "Rows",
        f"Experts used\nof {experts}",
        f"Busiest\neven: {1 / max(1, experts):.2%}",
        f"Entropy, bits\nof {math.log2(max(1, experts)):.2f}",
    )
    rows: list[list[Cell]] = [
        [
            str(one.layer),
            f"{one.rows:,}",
            f"{one.used:,}",
            f"{one.busiest_share:.2%} (expert {one.busiest})",
            f"{one.entropy:.2f}",
        ]
        for one in found.layers
    ]
    return Table(titles, rows, numbers=range(1, 5))


def _verdict(found: Inspection) -> Iterator[Part]:
    count = len(found.verdicts)
    if found.good:
        all_of_them = f" ({count:,} sequences)" if count > 1 else ""
        limited = ", as far as it could be checked" if found.unchecked else ""
        yield f"ok{all_of_them}{limited}", "bold green"
    elif not found.verdicts:
        yield "refused: there is no sequence in it", "bold red"
    elif count == 1:
        yield [("refused: ", "bold red"), found.bad[0].problem]
    else:
        yield f"refused: {len(found.bad):,} of {count:,} sequences", "bold red"
        yield from (f"- {verdict.name}: {verdict.problem}" for verdict in found.bad[:_REFUSED])
        if len(found.bad) > _REFUSED:
            yield f"- and {len(found.bad) - _REFUSED:,} more: --json has them all", "dim"
