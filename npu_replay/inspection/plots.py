"""Pictures of a comparison, and of routes. Needs `pip install npu-replay[plots]`."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_replay.inspection.suspect_rows import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from npu_replay.inspection.inspection import Inspection, Strip
    from npu_replay.routes.checks import Array

_COLOURS = {"none": "#b3452c", "r2": "#3b6ea5", "r3": "#2f8a5b"}
_STYLES = {"none": "-", "r2": "-", "r3": "--"}
NAMES = {"none": "no replay", "r2": "R2", "r3": "R3"}

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


def demo(result: dict[str, Any]) -> bytes:
    """The demo's picture, as PNG: rollout against trainer on the left, the update on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained", dpi=110)
    left, middle, right = figure.subplots(1, 3)
    _differences(left, result["rollout_against_trainer"])
    _by_layer(middle, result["rollout_against_trainer"])
    _ratios(right, result["updates"])
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    about = result["versions"]
    figure.suptitle(
        f"Routing replay: {about['rollout']} rolls out, Megatron-core {about['megatron-core']} trains",
        x=0.01,
        ha="left",
        weight="bold",
    )
    return _png(figure)


def _differences(axes: Axes, against: dict[str, Any]) -> None:
    for name, row in against.items():
        sizes = sorted((abs(value) for value in row["differences"]), reverse=True)
        ranks = [(number + 1) / len(sizes) for number in range(len(sizes))]
        axes.plot(
            sizes, ranks, color=_COLOURS[name], lw=2, label=f"{NAMES[name]}, KL {row['log_probs']['kl']:.1e}"
        )
    axes.set(
        xscale="log", yscale="log", xlabel="|log-prob difference|, nats", ylabel="share of tokens above it"
    )
    axes.set_title("Rollout against trainer, sampled tokens", loc="left", fontsize=10)


def _by_layer(axes: Axes, against: dict[str, Any]) -> None:
    for offset, (name, row) in enumerate(against.items()):
        shares = row["routing"]["layer_mismatch"]
        places = [int(layer) + 0.4 * offset - 0.2 for layer in shares]
        axes.bar(
            places,
            [100 * share for share in shares.values()],
            width=0.38,
            color=_COLOURS[name],
            label=f"{NAMES[name]}, {row['routing']['router_mismatch']:.1%} in all",
        )
    axes.set(xlabel="decoder layer", ylabel="rows with other experts, %")
    axes.set_title("Router mismatch by layer", loc="left", fontsize=10)


def _ratios(axes: Axes, updates: dict[str, Any]) -> None:
    for name, row in updates.items():
        steps = range(1, len(row["flipped"]) + 1)
        flipped = row["flipped"][-1] / row["token_layers"]
        axes.fill_between(steps, row["ratio_min"], row["ratio_max"], color=_COLOURS[name], alpha=0.15, lw=0)
        for side, label in (
            ("ratio_min", f"{NAMES[name]}, {flipped:.0%} of routes flipped"),
            ("ratio_max", None),
        ):
            axes.plot(steps, row[side], _STYLES[name], color=_COLOURS[name], lw=1.8, label=label)
    axes.set(xlabel="optimizer step on one batch", ylabel="policy ratio, smallest to largest", yscale="log")
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for the legend
    axes.set_yticks([0.5, 0.7, 1, 1.4, 2, 2.8], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("The ratio that PPO clips", loc="left", fontsize=10)


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
        color=_COLOURS["none" if wrong else "r3"],
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
        axes.annotate("none was named", middle, ha="center", va="center", color=_COLOURS["none"])


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
