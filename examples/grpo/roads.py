"""How samples get from the engine to the ranks of the trainer, and weights back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from task import LONGEST

from examples.qwen3_moe.sample import Sample
from npu_replay import RoutedExperts, RouteStore


class Engine(Protocol):
    """`examples.qwen3_moe.vllm_engine.Vllm`, or `server.Server`."""

    def sample(
        self, prompts: Sequence[Sequence[int]], *, each: int, longest: int, temperature: float = 1.0
    ) -> list[Sample]: ...

    def load(self, folder: str) -> int: ...


class Answer:
    """Every rank asks the engine itself, for its part of the prompts: routes travel in the answers.

    Args:
        folder: where what travels in files lies.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def sample(self, prompts: Sequence[Sequence[int]], each: int, temperature: float = 1.0) -> list[Sample]:
        """This rank's samples."""
        return self._asked(prompts[dist.get_rank() :: dist.get_world_size()], each, temperature)

    def load(self, folder: Path) -> int:
        """Give the engine the weights in this folder, once; which version they are there."""
        version = [None if dist.get_rank() else self.engine.load(str(folder))]
        dist.broadcast_object_list(version)
        return cast(int, version[0])

    def _asked(self, prompts: Sequence[Sequence[int]], each: int, temperature: float) -> list[Sample]:
        return self.engine.sample(prompts, each=each, longest=LONGEST, temperature=temperature)


class Wire(Answer):
    """Rank 0 asks for all and sends each rank its part: routes travel as bytes that describe themselves."""

    def sample(self, prompts: Sequence[Sequence[int]], each: int, temperature: float = 1.0) -> list[Sample]:
        parts: list[Any] = [None] * dist.get_world_size()
        if not dist.get_rank():
            everything = self._asked(prompts, each, temperature)
            sent = list(zip(everything, self._send(everything), strict=True))
            for rank in range(len(parts)):
                groups = range(rank * each, len(sent), each * len(parts))
                parts[rank] = [
                    (sample.tokens, sample.prompt, sample.log_probs, routes)
                    for start in groups
                    for sample, routes in sent[start : start + each]
                ]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, parts)
        return [
            Sample(tokens, prompt, log_probs, self._receive(routes, tokens))
            for tokens, prompt, log_probs, routes in mine[0]
        ]

    def _send(self, samples: list[Sample]) -> list[Any]:
        return [sample.routes.to_bytes() for sample in samples]

    def _receive(self, sent: Any, tokens: torch.Tensor) -> RoutedExperts:
        return RoutedExperts.from_bytes(sent)


class Store(Wire):
    """Rank 0 asks for all and writes the routes down; each rank reads those of its samples."""

    _written = 0

    def _send(self, samples: list[Sample]) -> list[Any]:
        self._written += 1
        place = self.folder / f"routes-{self._written}"
        with RouteStore.writer(place, name="rollout") as writer:
            for number, sample in enumerate(samples):
                writer.add(sample.routes, str(number))  # two samples of a group may have the same tokens
        return [(place, str(number)) for number in range(len(samples))]

    def _receive(self, sent: Any, tokens: torch.Tensor) -> RoutedExperts:
        place, key = sent
        return RouteStore(place)[key]


ROADS = {"answer": Answer, "wire": Wire, "store": Store}


def together(values: Any) -> torch.Tensor:
    """The values of all ranks, one behind the other."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, torch.as_tensor(values))
    return torch.cat(gathered)
