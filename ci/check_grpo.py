"""Assert what the GRPO example has to show: python ci/check_grpo.py DIR/grpo.json ..."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from check_demo import report


def check(result: dict[str, Any]) -> list[str]:
    """What isn't as it has to be, in words."""
    rows = {arm: [] for arm in ("none", "R2", "R3", "TIS", "TIS+R3")}
    for run in result["runs"]:
        rows[run["arm"]] += run["rows"]
    replayed = rows["R3"] + rows["TIS+R3"]
    live = rows["none"] + rows["TIS"]
    every = [row for found in rows.values() for row in found]
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


if __name__ == "__main__":
    sys.exit(report(sys.argv[1:], check) if len(sys.argv) > 1 else "usage: check_grpo.py grpo.json ...")
