"""The curves of a run and the table beside them.

`python examples/grpo/curves.py grpo.json grpo.png` draws them again.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_replay import tables

COLOURS = {"none": "#b3452c", "R2": "#3b6ea5", "R3": "#2f8a5b", "TIS": "#d9822b", "TIS+R3": "#7b3fa0"}
PANELS = {
    "accuracy": "accuracy, greedy",
    "reward": "reward of a rollout",
    "router_mismatch": "router mismatch with the engine",
    "rollout_train_k3_kl": "KL between engine and trainer, nats",
    "ratio_max": "largest ratio",
    "gradient_norm": "gradient norm",
}
LOGARITHMIC = {"rollout_train_k3_kl"}
SMOOTH = 5
"""Steps that a curve is averaged over; accuracy isn't."""
DIGITS = 6
"""Of the numbers in grpo.json."""
Row = dict[str, Any]


def draw(source: Path, target: Path) -> None:
    """One panel a figure: each arm's mean over its seeds, in a band from the least to the most."""
    from matplotlib.figure import Figure

    result = json.loads(source.read_text())
    figure = Figure(figsize=(8.6, 9), layout="constrained", dpi=110)
    for axes, (name, title) in zip(figure.subplots(3, 2).flat, PANELS.items(), strict=True):
        for arm in arms(result):
            steps, low, middle, high = band(of(result, arm), name)
            axes.plot(
                steps,
                middle,
                "--" if arm == "TIS+R3" else "-",
                color=COLOURS[arm],
                label=arm if arm != "none" else "no replay",
            )
            axes.fill_between(steps, low, high, color=COLOURS[arm], alpha=0.15, linewidth=0)
        axes.set_title(title, loc="left", fontsize=12)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        if name in LOGARITHMIC:
            axes.set_yscale("log")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    about, versions = result["settings"], result["versions"]
    trainer = "Megatron-core " + versions["megatron-core"] if about["trainer"] == "megatron" else "FSDP2"
    bits = about["rollout_bits"]
    rollout = "bfloat16" if bits == 7 else f"{bits} bits of mantissa"
    seeds = len({run["seed"] for run in result["runs"]})
    figure.suptitle(
        f"GRPO: vLLM {versions['vllm']} in {rollout}, {trainer} in float32,\n{about['layers']} layers, "
        f"{about['experts']} experts, {about['mini_batches']} steps a rollout; {seeds} seeds",
        x=0.01,
        ha="left",
        weight="bold",
    )
    figure.savefig(target)


def show(result: dict[str, Any]) -> None:
    """The table beside them: over all steps and seeds, rewards and accuracies over the last steps."""
    titles = (
        "arm|reward,\nlast 10|accuracy,\nlast|k3 KL,\nnats|tau2|router\nmismatch|in the\nupdate|"
        "largest\nratio|clipped|gradient\nnorm|entropy,\nlast|seconds\na step"
    )
    rows = []
    for arm in arms(result):
        runs = of(result, arm)
        every = [row for rows in runs for row in rows]
        last = [rows[-1] for rows in runs]
        rows.append(
            (
                arm,
                spread([mean(rows[-10:], "reward") for rows in runs]),
                spread([[row["accuracy"] for row in rows if "accuracy" in row][-1] for rows in runs]),
                f"{mean(every, 'rollout_train_k3_kl'):.1e}",
                share(every, "extreme_frac_tau2", 3),
                share(every, "router_mismatch"),
                share(every, "update_mismatch"),
                f"{max(row['ratio_max'] for row in every):.1f}",
                share(every, "clip_fraction"),
                f"{mean(every, 'gradient_norm'):.2f}",
                f"{mean(last, 'entropy'):.2f}",
                f"{sum(mean(every, name) for name in parts(every)):.1f}",
            )
        )
    tables.show([tables.Table(titles.split("|"), rows, numbers=range(1, 12))])


def summary(rows: Sequence[Row]) -> str:
    """One run in a line."""
    first, last = rows[0], rows[-1]
    accuracy = [row["accuracy"] for row in rows if "accuracy" in row]
    return (
        f"reward {first['reward']:.2f} to {last['reward']:.2f}, accuracy {accuracy[-1]:.2f}, "
        f"router mismatch {mean(rows, 'router_mismatch'):.2%}, KL {mean(rows, 'rollout_train_k3_kl'):.1e}"
    )


def rounded(row: Row) -> Row:
    """The row as grpo.json keeps it."""
    return {
        name: float(f"{value:.{DIGITS}g}") if type(value) is float else value for name, value in row.items()
    }


def arms(result: dict[str, Any]) -> list[str]:
    """In the order in which they ran."""
    return list(dict.fromkeys(run["arm"] for run in result["runs"]))


def of(result: dict[str, Any], arm: str) -> list[list[Row]]:
    """The rows of an arm, a list for each seed."""
    return [run["rows"] for run in result["runs"] if run["arm"] == arm]


def band(runs: Sequence[Sequence[Row]], name: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and at each the least, the mean and the most of the seeds."""
    steps = [row["step"] for row in runs[0] if name in row]
    curves = [
        smooth([row[name] for row in rows if name in row], 1 if name == "accuracy" else SMOOTH)
        for rows in runs
    ]
    at = list(zip(*curves, strict=True))
    return steps, list(map(min, at)), list(map(statistics.fmean, at)), list(map(max, at))


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Means of up to `width` values, each with those before it."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def parts(rows: Sequence[Row]) -> list[str]:
    """The names of a step's parts, all but what only some steps have."""
    return [name for name in rows[0] if name.startswith("seconds, ") and name != "seconds, evaluation"]


def mean(rows: Sequence[Row], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def share(rows: Sequence[Row], name: str, digits: int = 2) -> str:
    """In percent; «0» where it is 0 in every row, and not where it is too little for the digits."""
    return f"{mean(rows, name):.{digits}%}" if any(row[name] for row in rows) else "0"


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation over the seeds."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f}±{statistics.stdev(values):.2f}"


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
    show(json.loads(Path(sys.argv[1]).read_text()))
