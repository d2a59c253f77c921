"""What `npu-replay inspect` found, for people: what it is, each layer, and the verdict last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from npu_replay.inspection.inspection import Inspection
from npu_replay.inspection.judge import Verdict
from npu_replay.inspection.suspect_rows import MEANINGS, LayerFigures
from npu_replay.tables import Cell, Part, Table

_ROWS = 24
"""More layers than these are put together where they look alike."""
_REFUSED = 8
"""So many refused sequences are told of in full."""


def parts(found: Inspection) -> Iterator[Part]:
    """What it is, each layer, what couldn't be checked, and the verdict: lines and a table."""
    if found.what:
        yield [(found.path, "bold"), f": {found.what}"]
        yield from _about(found)
    if found.layers:
        yield ""
        yield _table(found)
        for word in dict.fromkeys(word for layer in found.layers for word in layer.wrong):
            yield f"{word}: {MEANINGS[word]}", "dim"
    if found.unchecked:
        yield ""
        yield "Not checked:", "yellow"
        yield from (f"- {what}" for what in found.unchecked)
    if found.what or found.layers or found.unchecked:
        yield ""
    yield from _verdict(found)


def _about(found: Inspection) -> Iterator[str]:
    seen = [verdict for verdict in found.verdicts if verdict.columns or verdict.rows is not None]
    if len(seen) == 1 and len(found.verdicts) == 1:
        yield _sizes(seen[0], found)
        yield from ([", ".join(seen[0].facts)] if seen[0].facts else [])
    elif seen:
        tokens = sum(verdict.tokens or verdict.rows or 0 for verdict in seen)
        size = sum(verdict.nbytes for verdict in seen)
        whole = f"{len(found.verdicts):,} sequences, {tokens:,} tokens, {size:,} bytes"
        yield f"{whole}; {_model(seen[0], found)}"


def _sizes(verdict: Verdict, found: Inspection) -> str:
    counted = [f"{verdict.tokens:,} tokens"] if verdict.tokens is not None else []
    counted += [f"{verdict.rows:,} rows"] if verdict.rows is not None else []
    parts = [", ".join(counted)] if counted else []
    parts += [_model(verdict, found)] if verdict.columns else []
    parts += [f"{verdict.dtype}, {verdict.nbytes:,} bytes"] if verdict.dtype else []
    return "; ".join(parts)


def _model(verdict: Verdict, found: Inspection) -> str:
    of = f"of {found.num_experts}" if found.experts_known else f"of {found.num_experts} or more"
    layers = f"{verdict.layers} layers"
    if verdict.columns != verdict.layers:
        layers += f" of {verdict.columns}"
    return f"top-{verdict.topk} {of} experts in {layers}"


def _table(found: Inspection) -> Table:
    experts = max(1, found.num_experts)
    of_all = ("", "", "")
    if found.experts_known:
        of_all = (f"\nof {experts}", f"\neven: {1 / experts:.2%}", f"\nof {math.log2(experts):.2f}")
    titles = (
        "Layer",
        "Rows",
        f"Experts used{of_all[0]}",
        f"Busiest{of_all[1]}",
        f"Entropy, bits{of_all[2]}",
        "As the row\nbefore",
        "Suspect, rows",
    )
    rows: list[Sequence[Cell]] = []
    for group in _groups(found.layers):
        *cells, wrong = _cells(group)
        rows.append([*cells, (wrong, "bold red")])
    return Table(titles, rows, numbers=range(1, 6))


def _groups(layers: Sequence[LayerFigures]) -> Iterable[Sequence[LayerFigures]]:
    """Each layer by itself; where there are many, neighbours in which the same is wrong together."""
    if len(layers) <= _ROWS:
        return [[layer] for layer in layers]
    return [list(group) for _, group in groupby(layers, key=lambda layer: tuple(layer.wrong))]


def _cells(group: Sequence[LayerFigures]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    busiest = _range([layer.busiest_share for layer in group], ".2%")
    if len(group) == 1 and first.busiest is not None:
        busiest = f"{busiest} (expert {first.busiest})"
    return (
        str(first.layer) if len(group) == 1 else f"{first.layer} to {last.layer}",
        _range([layer.rows for layer in group], ","),
        _range([layer.used for layer in group], ","),
        busiest if any(layer.rows for layer in group) else "-",
        _range([layer.entropy for layer in group], ".2f") if any(layer.rows for layer in group) else "-",
        _range([layer.repeated for layer in group], ","),
        ", ".join(f"{word} {_range([layer.wrong[word] for layer in group], ',')}" for word in first.wrong),
    )


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} - {high}"


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
