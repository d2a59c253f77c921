"""The demo's two tables and its progress, for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from npu_replay.inspection.plots import NAMES
from npu_replay.tables import Table


@contextlib.contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[..., None]]:
    """A progress display for a block; call it with a title at each part, without at a step."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=2 + 3 * (steps + 1))

        def advance(title: str | None = None) -> None:
            if title is not None:
                bar.update(task, description=title)
                if not console.is_terminal:
                    console.print(f"  {title}")
            bar.advance(task)

        yield advance


def tables(result: dict[str, Any]) -> list[Group]:
    """Rollout against trainer, and the update."""
    about, settings = result["versions"], result["settings"]
    steps = settings["steps"]
    against = [
        (
            NAMES[name],
            f"{row['routing']['router_mismatch']:.2%}",
            f"{row['routing']['token_mismatch']:.2%}",
            f"{row['log_probs']['kl']:.2e}",
            f"{row['log_probs']['max_difference']:.3f}",
        )
        for name, row in result["rollout_against_trainer"].items()
    ]
    updates = [
        (
            NAMES[name],
            f"{row['flipped'][-1]:,} of {row['token_layers']:,}",
            _span(row["ratio_min"][0], row["ratio_max"][0]),
            _span(row["ratio_min"][-1], row["ratio_max"][-1]),
            f"{row['ratio_kl'][-1]:.2e}",
        )
        for name, row in result["updates"].items()
    ]
    return [
        _titled(
            f"Rollout: {about['rollout']}, bfloat16. "
            f"Trainer: Megatron-core {about['megatron-core']}, float32.\n"
            f"Their difference over {settings['tokens']} sampled tokens:",
            "trainer | router mismatch | tokens with one | KL, nats | largest log-prob\ndifference, nats",
            against,
        ),
        _titled(
            f"The policy over {steps} optimizer steps on one batch.\n"
            "Ratio and KL are against the trainer's log-probs before step 1:",
            f"update | token-layers flipped\nfrom step 1 to {steps} | ratio at\nstep 1 | "
            f"ratio at step {steps},\nmin to max | KL, nats",
            updates,
        ),
    ]


def _titled(heading: str, titles: str, rows: Sequence[Sequence[str]]) -> Group:
    table = Table(titles.split(" | "), rows, numbers=range(1, 5), ruled=True, space=3)
    return Group(Text(heading, "bold"), table)


def _span(low: float, high: float) -> str:
    return "exactly 1" if low == high == 1 else f"{low:.3f} to {high:.3f}"
