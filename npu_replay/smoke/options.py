"""What `npu-replay smoke` takes, and whether it fits the number of processes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_replay.smoke.model import Split

ABOUT = "Try routing replay on this stack, device and split (exits 1 if something fails)."
HELP = {
    "tp": "Tensor parallel ranks; with more than one sequence parallelism is on too.",
    "pp": "Pipeline stages.",
    "ep": "Expert parallel ranks.",
    "cp": "Context parallel ranks.",
    "vp": "Virtual stages of each pipeline rank.",
    "etp": "Tensor parallel ranks within experts.",
    "recompute": "Try full activation recompute too.",
    "sequence_parallel": "On by itself with --tp 2 or more: Megatron trains no MoE layers without.",
    "device": "Where to run; auto takes an accelerator if there is one.",
    "json": "JSON file for the results, to attach to a report.",
    "force": "Overwrite what an earlier run wrote.",
    "patience": "Seconds that a rank waits for another before it says so.",
}
SIZES = ("tp", "pp", "ep", "cp", "vp", "etp")
DEVICES = ("auto", "cpu", "cuda", "npu")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    vp: int = 1
    etp: int = 1
    recompute: bool = False
    sequence_parallel: bool = False
    device: str = "auto"
    json: Path | None = None
    force: bool = False
    patience: float = 60.0

    @property
    def split(self) -> Split:
        """The parallel axes, and a model that can be cut like that."""
        from npu_replay.smoke.model import Split

        return Split(**{name: getattr(self, name) for name in SIZES})

    def problem(self, processes: int) -> str:
        """Why so many processes can't run this; empty if they can."""
        low = [f"--{name} {size}" for name in SIZES if (size := getattr(self, name)) < 1]
        if low:
            return f"{', '.join(low)}: a size is at least 1"
        if self.vp > 1 and self.pp == 1:
            return "--vp needs a pipeline: --pp 2 or more"
        if self.sequence_parallel and self.tp == 1:
            return "--sequence-parallel needs --tp 2 or more, and is on by itself there"
        if self.patience <= 0:
            return "--patience is a number of seconds above 0"
        multiple = self.split.multiple
        if processes % multiple:
            return (
                f"these sizes need a multiple of {multiple} processes, and there "
                f"{'is' if processes == 1 else 'are'} {processes}: torchrun --nproc-per-node {multiple} "
                "(a multiple of tp * cp * pp and of etp * ep * pp; count those of all nodes)"
            )
        if self.json is not None and os.path.exists(self.json) and not self.force:
            return f"{self.json} is there already and is not overwritten; --force does"
        return ""


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line where typer isn't installed; exits 2 if it can't be read."""
    parser = argparse.ArgumentParser(prog="npu-replay smoke", description=ABOUT)
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, default=1, help=HELP[name])
    for name in ("recompute", "sequence_parallel", "force"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=HELP[name])
    parser.add_argument("--device", choices=DEVICES, default="auto", help=HELP["device"])
    parser.add_argument("--json", type=Path, metavar="FILE", help=HELP["json"])
    parser.add_argument("--patience", type=float, default=Options.patience, help=HELP["patience"])
    return Options(**vars(parser.parse_args(arguments)))
