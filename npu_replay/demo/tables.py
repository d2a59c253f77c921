"""The demo's two tables and its progress, for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from npu_replay.tables import Table

_NAMES = {"none": "no replay", "r2": "R2", "r3": "R3"}


def progress(stack: contextlib.ExitStack, console: Console, steps: int) -> Callable[..., None]:
    """A progress display for the length of `stack`; call it with a title at each part, without at a step."""
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    )
    stack.enter_context(bar)
    task = bar.add_task("starting", total=2 + 3 * (steps + 1))

    def advance(title: str | None = None) -> None:
        if title is not None:
            bar.update(task, description=title)
            if not console.is_terminal:
                console.print(f"  {title}")
        bar.advance(task)

    return advance


def tables(result: dict[str, Any]) -> list[Group]:
    """Rollout against trainer, and the update."""
    return [_against(result), _updates(result)]


def _against(result: dict[str, Any]) -> Group:
    about = result["versions"]
    title = (
        f"Rollout: transformers {about['transformers']}, bfloat16. "
        f"Trainer: Megatron-core {about['megatron-core']}, float32.\n"
        f"Their difference over {result['settings']['tokens']} sampled tokens:"
    )
    titles = (
        "trainer",
        "router mismatch",
        "tokens with one",
        "KL, nats",
        "largest log-prob\ndifference, nats",
    )
    rows = []
    for name, row in result["rollout_against_trainer"].items():
        routing, log_probs = row["routing"], row["log_probs"]
        rows.append(
            (
                _NAMES[name],
                f"{routing['router_mismatch']:.2%}",
                f"{routing['token_mismatch']:.2%}",
                f"{log_probs['kl']:.2e}",
                f"{log_probs['max_difference']:.3f}",
            )
        )
    return _titled(title, titles, rows)


def _updates(result: dict[str, Any]) -> Group:
    steps = result["settings"]["steps"]
    title = (
        f"The policy over {steps} optimizer steps on one batch.\n"
        "Ratio and KL are against the trainer's log-probs before step 1:"
    )
    titles = (
        "update",
        f"token-layers flipped\nfrom step 1 to {steps}",
        "ratio at\nstep 1",
        f"ratio at step {steps},\nmin to max",
        "KL, nats",
    )
    rows = [
        (
            _NAMES[name],
            f"{row['flipped'][-1]:,} of {row['token_layers']:,}",
            _span(row["ratio_min"][0], row["ratio_max"][0]),
            _span(row["ratio_min"][-1], row["ratio_max"][-1]),
            f"{row['ratio_kl'][-1]:.2e}",
        )
        for name, row in result["updates"].items()
    ]
    return _titled(title, titles, rows)


def _titled(title: str, titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Group:
    return Group(Text(title, "bold"), Table(titles, rows, numbers=range(1, 5), ruled=True, space=3))


def _span(low: float, high: float) -> str:
    return "exactly 1" if low == high == 1 else f"{low:.3f} to {high:.3f}"
