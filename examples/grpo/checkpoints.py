"""Where a run goes on that was cut off: a checkpoint a rank, and the rows of the steps that it has taken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def load(rows: Path, state: list[Any]) -> int:
    """Take the state of the last step that every rank has kept.

    Args:
        rows: the file with a line a step; the checkpoints lie beside it.
        state: what has a state_dict, in the order in which it was saved.

    Returns:
        The step that comes next, 0 where none was kept.
    """
    place = _place(rows)
    kept = torch.load(place, weights_only=False) if place.exists() else {"step": -1}
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, kept["step"])
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"the ranks' checkpoints {place.stem}* are of steps {steps}: cut off while they were written; "
            "remove them, and the run starts anew"
        )
    if kept["step"] < 0:
        rows.unlink(missing_ok=True)
        return 0
    for part, saved in zip(state, kept["state"], strict=True):
        part.load_state_dict(saved)
    if not dist.get_rank():  # a row may have been written whose checkpoint wasn't
        lines = [line for line in rows.read_text().splitlines() if json.loads(line)["step"] <= kept["step"]]
        rows.write_text("".join(f"{line}\n" for line in lines))
    return int(kept["step"]) + 1


def save(rows: Path, state: list[Any], row: dict[str, Any]) -> None:
    """Keep a step: its row first, then what comes after it goes on from."""
    if not dist.get_rank():
        with rows.open("a") as out:
            print(json.dumps(row), file=out)
    place = _place(rows)
    torch.save({"step": row["step"], "state": [part.state_dict() for part in state]}, f"{place}.part")
    dist.barrier()
    os.replace(f"{place}.part", place)


def _place(rows: Path) -> Path:
    return rows.with_suffix(f".rank{dist.get_rank()}.pt")
