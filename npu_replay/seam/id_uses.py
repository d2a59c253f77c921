"""Follow the uses of the ids in a block without a router module.

Where the router is a whole block, its output shows no ids. But they reach its experts through functions of
torch (`one_hot`, `gather`, a cast for a kernel). So every integer tensor [rows, topk] that such a function is
given after the top-k must hold the ids, row by row. `watch.Watch` shows each of these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from npu_replay.seam.torch_state import outside_modes


class IdUses:
    """Checks the integer tensors [rows, topk] that torch's functions are given in one call of a block.

    They must hold `ids`, which are never written into; None: the content of the first of them.
    """

    depth = 0  # of torch's mode stack when `follow` was called

    def __init__(self, rows: int, topk: int, num_experts: int, ids: torch.Tensor | None = None) -> None:
        self.count = 0  # tensors so far
        self._shape = (rows, topk)
        self._num_experts = num_experts
        self._ids = ids
        self._held: torch.Tensor | None = None
        # In such a small batch a mask over experts, or the list of used experts, may have this shape, too.
        self._first_alone = rows == topk or (topk == 1 and rows <= num_experts)

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return for each such tensor among these arguments a bool [rows, topk]: which ids it holds."""
        if self._first_alone and self.count:
            return []
        matches: list[torch.Tensor] = []
        for tensor in _tensors(args, kwargs):
            dtype = tensor.dtype
            if (
                tensor.shape != self._shape
                or (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
                # Stride 0 is a row index that was expanded to the shape of the ids.
                or (tensor.stride(1) == 0 and self._shape[1] > 1)
            ):
                continue
            with outside_modes():
                if self._ids is None:
                    self._ids = tensor.clone()
                matches.append(tensor.to(self._ids) == self._ids)
        return matches

    def add(self, matches: Sequence[torch.Tensor]) -> None:
        """Count tensors that a function has used to make a tensor."""
        self.count += len(matches)
        with outside_modes():
            for match in matches:
                self._held = match if self._held is None else self._held & match

    def shown(self) -> torch.Tensor:
        """Return bool [rows, experts]: the ids that all of the tensors held; none if there was no tensor."""
        rows = self._shape[0]
        experts = self._num_experts
        if self._held is None or self._ids is None:
            return torch.zeros(rows, experts, dtype=torch.bool, device="cpu")
        inside = self._held & (self._ids >= 0) & (self._ids < experts)
        shown = torch.zeros(rows, experts + 1, dtype=torch.bool, device=self._ids.device)
        return shown.scatter(1, self._ids.where(inside, experts).long(), True)[:, :experts]


def run_seen(
    takers: Sequence[IdUses], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a function of torch; one that makes no tensor of the ids (`size`, `device`) hasn't used them."""
    matches = [taken.holds(args, kwargs) for taken in takers]  # before the call, which may write into them
    result = func(*args, **kwargs)
    if any(matches) and any(True for _ in _tensors((result,), {})):
        for taken, mine in zip(takers, matches, strict=True):
            taken.add(mine)
    return result


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments, and in lists and tuples there (an index of several)."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item
