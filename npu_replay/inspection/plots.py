"""The picture of `npu-replay inspect`. Needs `pip install npu-replay[plots]`."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from npu_replay.inspection.suspect_rows import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from npu_replay.inspection.inspection import Inspection, Strip
    from npu_replay.routes.checks import Array

_WRONG, _RIGHT = "#b3452c", "#2f8a5b"
_CELLS = {
    Cell.DENSE: "#f2f2f2",
    Cell.GOOD: "#d3e6dc",
    Cell.NO_ROUTE: "#b9b9b9",
    Cell.COPY: "#3b6ea5",
    Cell.STUCK: "#d9822b",
    Cell.ZEROS: "#b3452c",
    Cell.TWICE: "#7b3fa0",
    Cell.OUTSIDE: "#e3b505",
    Cell.SHIFTED: "#c2185b",
    Cell.REFUSED: "#6d1f14",
}
_LOAD = ("#ffffff", "#9dbbd8", "#3b6ea5", "#12263d")
_WIDEST = 600  # rows that are drawn, fewer than the picture has pixels; of more, the worst of some neighbours


def routes(found: Inspection) -> bytes:
    """What `npu-replay inspect` found, as PNG: each layer's load on the left, its rows on the right."""
    from matplotlib.figure import Figure

    layers = found.strip.layers if found.strip is not None else tuple(sorted(found.load))
    height = min(9.0, max(4.2, 1.8 + 0.14 * len(layers)))
    figure = Figure(figsize=(13, height), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    if layers:
        _load(left, found, layers)
        _rows(right, found.strip)
    for axes in (left, right):
        _decoder_layers(axes, layers)
    figure.suptitle(f"{Path(found.path).name}: {found.what}", x=0.01, ha="left", weight="bold")
    wrong = [verdict.problem for verdict in found.bad]
    several = f"{len(wrong)} of {len(found.verdicts)} refused. " if len(found.verdicts) > 1 else ""
    said = several + (wrong[0] if wrong else "ok")
    figure.supxlabel(
        textwrap.fill(textwrap.shorten(said, 380), 170),
        x=0.01,
        ha="left",
        fontsize=10,
        color=_WRONG if wrong else _RIGHT,
    )
    return _png(figure, said)


def _png(figure: Figure, about: str = "") -> bytes:
    """The picture, with what it is about in its own description."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Description": about} if about else {})
    return buffer.getvalue()


def _load(axes: Axes, found: Inspection, layers: tuple[int, ...]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shares = np.full((len(layers), max(1, found.num_experts)), np.nan)
    for place, layer in enumerate(layers):
        load = found.load.get(layer)
        if load is not None and load.any():
            shares[place] = 0
            shares[place, : len(load)] = load / load.sum() * found.num_experts
    seen = shares[~np.isnan(shares)]
    top = max(2.0, float(np.percentile(seen, 99.5))) if seen.size else 2.0
    colours = LinearSegmentedColormap.from_list("load", _LOAD).with_extremes(bad=_CELLS[Cell.DENSE])
    image = axes.imshow(shares, aspect="auto", interpolation="none", cmap=colours, vmin=0, vmax=top)
    bar = axes.figure.colorbar(image, ax=axes, extend="max", pad=0.02, aspect=30)
    bar.set_label("times the even share", fontsize=9)
    bar.outline.set_visible(False)
    axes.set(xlabel="expert")
    axes.set_title("Load: how often each expert was named; white is never", loc="left", fontsize=10)
    if not seen.size:
        middle = (found.num_experts / 2, len(layers) / 2 - 0.5)
        axes.annotate("none was named", middle, ha="center", va="center", color=_WRONG)


def _rows(axes: Axes, strip: Strip | None) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    if strip is None or not strip.cells.size:
        return
    count = len(strip.cells)
    image = axes.imshow(
        _narrowed(strip.cells).T,
        aspect="auto",
        interpolation="none",
        cmap=ListedColormap([_CELLS[kind] for kind in Cell]),
        vmin=-0.5,
        vmax=len(Cell) - 0.5,
    )
    image.set_extent((strip.first - 0.5, strip.first + count - 0.5, len(strip.layers) - 0.5, -0.5))
    present = [kind for kind in Cell if (strip.cells == kind).any()]
    axes.legend(
        handles=[Patch(facecolor=_CELLS[kind], label=kind.word) for kind in present],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(present),
        frameon=False,
        fontsize=9,
        borderaxespad=0.1,
        handlelength=1,
        columnspacing=1.2,
    )
    axes.set(xlabel="row (token)" if strip.each == "row" else "sequence, as the worst of its rows")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Rows" if strip.each == "row" else "Sequences", loc="left", fontsize=10)


def _narrowed(cells: Array) -> Array:
    """At most _WIDEST rows: each the worst of its neighbours."""
    if len(cells) <= _WIDEST:
        return cells
    edges = np.linspace(0, len(cells), _WIDEST, endpoint=False).astype(np.int64)
    return np.maximum.reduceat(cells, edges, axis=0)


def _decoder_layers(axes: Axes, layers: tuple[int, ...]) -> None:
    step = max(1, -(-len(layers) // 12))
    places = range(0, len(layers), step)
    axes.set_yticks(list(places), [str(layers[place]) for place in places])
    axes.set(ylabel="decoder layer")
    axes.spines[:].set_visible(False)
