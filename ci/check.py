"""Assert what an example has to show: python ci/check.py demo DIR/demo.json, or grpo DIR/grpo.json ..."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def demo(result: dict[str, Any]) -> list[str]:
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


def grpo(result: dict[str, Any]) -> list[str]:
    """What isn't as it has to be, in words."""
    rows = {arm: [] for arm in ("none", "R2", "R3", "TIS", "TIS+R3")}
    for run in result["runs"]:
        rows[run["arm"]] += run["rows"]
    replayed = rows["R3"] + rows["TIS+R3"]
    live = rows["none"] + rows["TIS"]
    every = [row for arm_rows in rows.values() for row in arm_rows]
    promises = {
        "there are steps with R3": bool(replayed),
        "router mismatch 0 with R3, in every step": not any(row["router_mismatch"] for row in replayed),
        "router mismatch 0 with R3, in every update": not any(row["update_mismatch"] for row in replayed),
        "the ratio is exactly 1 in each step's first update": all(row["first_ratio_is_1"] for row in every),
        "router mismatch without R3": all(row["router_mismatch"] for row in live + rows["R2"]),
    }
    of_record = [row["replay_mismatch"] for row in rows["R2"] if "replay_mismatch" in row]
    if of_record:  # a figure that the published runs lack
        promises["the update's routers show what was recorded, with R2"] = not any(of_record)
    if live and replayed:
        kl = [[row["rollout_train_k3_kl"] for row in some] for some in (replayed, live)]
        smaller = statistics.median(kl[0]) <= 0.7 * statistics.median(kl[1])
        promises["a KL with R3 of at most 0.7 of that without, as medians of the steps"] = smaller
    return [promise for promise, kept in promises.items() if not kept]


def main(example: str, *paths: str) -> int:
    """Say of each result which promises it breaks; 1 if it is any, 0 if none."""
    failed = {path: CHECKS[example](json.loads(Path(path).read_text())) for path in paths}
    for path, promises in failed.items():
        lines = [f"doesn't show: {promise}" for promise in promises] or ["shows all that it has to"]
        print(*(f"{path} {line}" for line in lines), sep="\n")
    return int(not paths or any(failed.values()))


CHECKS = {"demo": demo, "grpo": grpo}

if __name__ == "__main__":
    asked = sys.argv[1:2] and sys.argv[1] in CHECKS
    sys.exit(main(*sys.argv[1:]) if asked else "usage: check.py demo|grpo FILE ...")
