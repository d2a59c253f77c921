"""The demo's two tables, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from examples.demo.picture import NAMES
from npu_replay.tables import Part, Table


def parts(result: dict[str, Any]) -> Iterator[Part]:
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
    numbers = range(1, 5)
    heading = (
        f"Rollout: {about['rollout']}, bfloat16. Trainer: Megatron-core {about['megatron-core']}, float32.\n"
        f"Their difference over {settings['tokens']} sampled tokens:"
    )
    yield heading
    titles = (
        "trainer",
        "router mismatch",
        "tokens with one",
        "KL, nats",
        "largest log-prob\ndifference, nats",
    )
    yield Table(titles, against, numbers)
    yield ""
    heading = (
        f"The policy over {steps} optimizer steps on one batch.\n"
        "Ratio and KL are against the trainer's log-probs before step 1:"
    )
    yield heading
    flipped, last = f"token-layers flipped\nfrom step 1 to {steps}", f"ratio at step {steps},\nmin to max"
    yield Table(("update", flipped, "ratio at\nstep 1", last, "KL, nats"), updates, numbers)


def _span(low: float, high: float) -> str:
    return "exactly 1" if low == high == 1 else f"{low:.3f} to {high:.3f}"
