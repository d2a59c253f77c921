"""The demo's picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"none": "#b3452c", "r2": "#3b6ea5", "r3": "#2f8a5b"}
_STYLES = {"none": "-", "r2": "-", "r3": "--"}
NAMES = {"none": "no replay", "r2": "R2", "r3": "R3"}


def draw(result: dict[str, Any]) -> bytes:
    """Draw the picture, as PNG: rollout against trainer on the left, the update on the right."""
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


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
