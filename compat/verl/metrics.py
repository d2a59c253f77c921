"""Makes the metrics of a pass, and the one line that says that replay is on."""

from __future__ import annotations

import logging
import sys
from typing import Any

from npu_replay.compat import probe
from npu_replay.compat.mindspeed import adaptors

_log = logging.getLogger("npu_replay.job")

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


def summary(mode: str, sums: dict[str, int], stack: str = "") -> str:
    """Return the one line that says that replay is on; `stack` is what it runs on, if it isn't Megatron."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    stages = 1
    if state is not None and state.model_parallel_is_initialized():
        stages = int(state.get_pipeline_model_parallel_world_size())
    routers, replayed = (sums[name] * stages // sums["ranks"] for name in ("routers", "replayed"))
    routed = sums["routed"] / max(sums["rows"], 1)
    percent = "100%" if routed == 1 else f"{min(routed * 100, 99.99):.2f}%"  # 100% only if all rows had one
    ranks = "1 rank" if sums["ranks"] == 1 else f"{sums['ranks']} ranks agree"
    if not stack:
        called = {"megatron-core": "Megatron"}
        called |= {"mindspeed": "MindSpeed"} if "mindspeed" in sys.modules else {}
        called |= {probe.ADAPTOR: probe.ADAPTOR} if "megatron_adaptor" in sys.modules else {}
        products = {product.name: product for product in probe.products() if product.installed}
        versions = {name: product.version or "?" for name, product in products.items()}
        if "mindspeed" in products:
            versions["mindspeed"] = adaptors.release_of(products["mindspeed"]) or "?"
        stack = ", ".join(f"{called[name]} {versions[name]}" for name in called if name in versions)
    by = f" ({stack})" if stack else ""
    return f"{mode}: {routers} routers, {replayed} replayed, {percent} of rows had a route, {ranks}{by}"


def announce(line: str) -> None:
    """Log a line at INFO, also in a process that shows warnings only; to stderr where no handler shows it."""
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    _log.info("[npu_replay] %s", line)
    logger: logging.Logger | None = _log
    handlers: list[logging.Handler] = []
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    if all(handler.level > logging.INFO for handler in handlers):
        sys.stderr.write(f"[npu_replay] {line}\n")
