"""How samples get from the engine to a rank of the trainer, and weights back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from task import LONGEST

from npu_replay.demo.rollout import Sample


class Engine(Protocol):
    """`npu_replay.demo.vllm_engine.Vllm`, or `server.Server`."""

    def sample(
        self, prompts: Sequence[Sequence[int]], *, each: int, longest: int, temperature: float = 1.0
    ) -> list[Sample]: ...

    def load(self, folder: str) -> None: ...


class Road:
    """Every rank asks the engine itself, for its own part of the prompts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def sample(self, prompts: Sequence[Sequence[int]], each: int, temperature: float = 1.0) -> list[Sample]:
        """This rank's samples."""
        mine = prompts[dist.get_rank() :: dist.get_world_size()]
        return self.engine.sample(mine, each=each, longest=LONGEST, temperature=temperature)

    def load(self, folder: Path) -> None:
        """Give the engine the weights in this folder, once."""
        if not dist.get_rank():
            self.engine.load(str(folder))
        dist.barrier()


def together(values: Any) -> torch.Tensor:
    """The values of all ranks, one behind the other."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, torch.as_tensor(values))
    return torch.cat(found)
