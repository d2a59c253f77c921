"""Define the options of `npu-replay smoke`, and the sizes of the model that fits them. Imports little."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path

from npu_replay import options

SIZES = {
    "tp": "Tensor parallel ranks; with more than one sequence parallelism is on too.",
    "pp": "Pipeline stages.",
    "ep": "Expert parallel ranks.",
    "cp": "Context parallel ranks.",
    "vp": "Virtual stages of each pipeline rank.",
    "etp": "Tensor parallel ranks within experts.",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Holds the command line's options, and sizes of a model that can be split accordingly.

    >>> options = Options(tp=2, pp=2, ep=2)
    >>> options.multiple, options.layers, options.experts, options.micro_batches
    (4, 4, 16, 4)
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    vp: int = 1
    etp: int = 1
    recompute: bool = False
    device: str = "auto"
    json: bool = False
    out: Path | None = None
    force: bool = False
    patience: int = 60

    @classmethod
    def of(cls, arguments: Namespace) -> Options:
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})

    def check(self, processes: int) -> None:
        """Raise WrongOption if this number of processes can't run this, or the report can't be written."""
        options.WrongOption.unless(
            processes % self.multiple == 0,
            f"these sizes need a multiple of {self.multiple} processes, and there "
            f"{'is' if processes == 1 else 'are'} {processes}: torchrun --nproc-per-node {self.multiple} "
            "(a multiple of tp * cp * pp and of etp * ep * pp; count those of all nodes)",
        )
        options.check_out(self.out, force=self.force)

    @property
    def multiple(self) -> int:
        """Return a divisor of every valid number of processes."""
        return math.lcm(self.tp * self.cp * self.pp, self.etp * self.ep * self.pp)

    @property
    def layers(self) -> int:
        """Return two or more layers a virtual stage, so that each has a router: the first layer is dense."""
        return self.pp * self.vp * max(2, -(-4 // (self.pp * self.vp)))

    @property
    def experts(self) -> int:
        """Return eight experts a rank, which are divisible into four groups."""
        return 8 * self.ep

    @property
    def micro_batches(self) -> int:
        """Return a multiple of the pipeline's stages, as interleaved schedules need it."""
        return 3 if self.pp == 1 else 2 * self.pp

    @property
    def vocabulary(self) -> int:
        """Return a vocabulary with the same number of token ids on each tensor-parallel rank."""
        return math.lcm(64, self.tp)

    @property
    def megatron_sizes(self) -> dict[str, int | None]:
        """Return the sizes by their names in Megatron's config and parallel state."""
        return {
            "tensor_model_parallel_size": self.tp,
            "context_parallel_size": self.cp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp if self.vp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }
