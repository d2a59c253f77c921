"""Draw the picture of `npu-replay inspect`. Needs matplotlib."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from npu_replay.inspection.found import Inspection

_WRONG, _RIGHT = "#b3452c", "#2f8a5b"
_COLOURS = ("#ffffff", "#9dbbd8", "#3b6ea5", "#12263d")


def routes(found: Inspection) -> bytes:
    """Draw the load as PNG: layers against experts, and how often each was named."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    layers = sorted(found.load)
    figure = Figure(figsize=(9, min(9.0, max(3.2, 1.8 + 0.14 * len(layers)))), layout="constrained", dpi=110)
    figure.suptitle(f"{Path(found.path).name}: {found.what}", x=0.01, ha="left", weight="bold")
    if layers:
        shares = np.zeros((len(layers), found.num_experts))
        for place, layer in enumerate(layers):
            counts = found.load[layer]
            shares[place, : len(counts)] = counts / max(1, counts.sum()) * found.num_experts
        axes = figure.subplots()
        colours = LinearSegmentedColormap.from_list("load", _COLOURS)
        top = max(2.0, float(np.percentile(shares, 99.5)))
        image = axes.imshow(shares, aspect="auto", interpolation="none", cmap=colours, vmin=0, vmax=top)
        bar = figure.colorbar(image, ax=axes, extend="max", pad=0.02, aspect=30)
        bar.set_label("times the even share", fontsize=9)
        bar.outline.set_visible(False)
        axes.set(xlabel="expert", ylabel="decoder layer")
        axes.set_title("Load: how often each expert was named; white is never", loc="left", fontsize=10)
        places = range(0, len(layers), max(1, -(-len(layers) // 12)))
        axes.set_yticks(list(places), [str(layers[place]) for place in places])
        axes.spines[:].set_visible(False)
    wrong = [verdict.problem for verdict in found.bad]
    several = f"{len(wrong)} of {len(found.verdicts)} refused. " if len(found.verdicts) > 1 else ""
    said = several + (wrong[0] if wrong else "ok")
    words = textwrap.fill(textwrap.shorten(said, 380), 120)
    figure.supxlabel(words, x=0.01, ha="left", fontsize=10, color=_WRONG if wrong else _RIGHT)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Description": said})
    return buffer.getvalue()
