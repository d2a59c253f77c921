"""Assert what the demo has to show: python ci/check_demo.py DIR/demo.json ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def check(result: dict[str, Any]) -> list[str]:
    """What isn't as it has to be, in words."""
    none, r3 = (result["rollout_against_trainer"][name] for name in ("none", "r3"))
    updates = result["updates"]
    promises = {
        "router mismatch above 2% without replay": none["routing"]["router_mismatch"] > 0.02,
        "router mismatch 0 with R3": r3["routing"]["differing"] == 0,
        "KL with R3 at most 5% of the KL without": r3["log_probs"]["kl"] <= 0.05 * none["log_probs"]["kl"],
        "a smaller largest log-prob difference with R3": r3["log_probs"]["max_difference"]
        < none["log_probs"]["max_difference"],
        "token-layers flip without replay": updates["none"]["flipped"][-1] > 0,
        "none flips with R2": max(updates["r2"]["flipped"]) == 0,
        "none flips with R3": max(updates["r3"]["flipped"]) == 0,
    }
    for name in ("none", "r2", "r3"):
        first = updates[name]["ratio_min"][0], updates[name]["ratio_max"][0]
        promises[f"the ratio is exactly 1 at step 1 ({name})"] = first == (1, 1)
    return [promise for promise, kept in promises.items() if not kept]


def report(paths: list[str], check: Callable[[dict[str, Any]], list[str]]) -> int:
    """Say of each result which promises it breaks; 1 if it is any, 0 if none."""
    broken = 0
    for path in paths:
        failed = check(json.loads(Path(path).read_text()))
        for promise in failed:
            print(f"{path} doesn't show: {promise}")
        if not failed:
            print(f"{path} shows all that it has to")
        broken += len(failed)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(report(sys.argv[1:], check) if len(sys.argv) > 1 else "usage: check_demo.py demo.json ...")
