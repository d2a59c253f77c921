"""Makes the metrics of a pass, and the one line that says that replay is on."""

from __future__ import annotations

import logging
import sys
from typing import Any

job_log = logging.getLogger("npu_replay.job")
"""Logs what an operator has to see, at WARNING, so that it is shown however a process logs."""

COUNTED = (
    *("rows", "routed", "samples", "bad_samples"),
    *("dropped", "chosen", "differing", "compared", "shared", "given"),
    *("replayed", "routers", "microseconds", "bytes"),
)
"""The counters of each rank in a pass."""


def figures(sums: dict[str, int]) -> dict[str, float]:
    """Return the metrics of a pass, by name; `sums` are of all ranks."""
    by_name = {
        "rows_without_route": 1 - sums["routed"] / max(sums["rows"], 1),
        "bad_samples": float(sums["bad_samples"]),
        "seconds": sums["microseconds"] / 1e6 / sums["ranks"],
        "megabytes": sums["bytes"] / 1e6 / sums["ranks"],
    }
    if sums["compared"]:
        by_name["live_mismatch"] = sums["differing"] / sums["compared"]
    if sums["given"]:
        by_name["overlap"] = sums["shared"] / sums["given"]
    if sums["chosen"]:
        by_name["capacity_dropped"] = sums["dropped"] / sums["chosen"]
    return {"npu_replay/" + name: value for name, value in by_name.items()}


def add_metrics(output: Any, metrics: dict[str, float]) -> None:
    """Add to verl's metrics, where there are some: {"metrics": {name: [values]}}, or 0.7's by micro-batch."""
    if not metrics or not isinstance(output, dict):
        return
    if isinstance(output.get("metrics"), dict):
        output["metrics"].update({name: [value] for name, value in metrics.items()})
    elif output.get("output") and isinstance(output["output"], list):
        first = output["output"][0]
        first = first[0] if isinstance(first, list | tuple) else first
        if isinstance(first, dict):
            first.update(metrics)


def summary(mode: str, sums: dict[str, int]) -> str:
    """Return the one line that says that replay is on."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    stages = 1
    if state is not None and state.model_parallel_is_initialized():
        stages = int(state.get_pipeline_model_parallel_world_size())
    routers, replayed = (sums[name] * stages // sums["ranks"] for name in ("routers", "replayed"))
    routed = sums["routed"] / max(sums["rows"], 1)
    percent = "100%" if routed == 1 else f"{min(routed * 100, 99.99):.2f}%"  # 100% only if all rows had one
    ranks = "1 rank" if sums["ranks"] == 1 else f"{sums['ranks']} ranks agree"
    return f"{mode}: {routers} routers, {replayed} replayed, {percent} of rows had a route, {ranks}"
