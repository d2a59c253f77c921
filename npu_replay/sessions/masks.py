"""Scores before they were masked: what a router made the argument of its top-k from.

A replayed expert may lie in a group that the router masked, and then needs its own score and not the mask's
number. `seam.Watch` sees each function that the router calls. A step back from the top-k's argument is taken
if the function may mask, and if the earlier scores agree with the later ones in what the router itself would
choose, and differ elsewhere: a mask leaves these as they are. An expert bias or a scale doesn't; nor is a sum
or a product a mask that makes any score higher, or whose other operand learns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from npu_replay.sessions.hooks import outside_modes

_FILLS = frozenset({"masked_fill", "where"})
"""These mask whatever the scores are, if they have one tensor of scores."""
_WRITES = frozenset({"setitem", "index_put", "index_fill", "scatter", "masked_scatter", "fill", "zero"})
_COMPUTES = frozenset({"add", "iadd", "sub", "isub", "mul", "imul", "div", "minimum", "maximum"})
_COPIES = frozenset({"clone", "contiguous", "to", "float", "double", "half", "bfloat16"})
_MAY_MASK = _FILLS | _WRITES | _COMPUTES | _COPIES

Path: TypeAlias = "list[tuple[int, int]]"
"""The steps back, by number, and in each the number of the tensor that was masked."""


class _Step(NamedTuple):
    """One function's: where its result lies, and what it made it from, and where that lay.

    All of them are held, so that nothing else comes to lie there.
    """

    name: str
    place: int
    made: torch.Tensor
    sources: list[tuple[torch.Tensor, int]]


class Masks:
    """The steps by which one call of a router makes its scores.

    Args:
        rows, num_experts: of the scores.
        paths: the steps back that earlier calls of the router took, by the names of all steps.
    """

    def __init__(self, rows: int, num_experts: int, paths: dict[tuple[str, ...], Path] | None = None) -> None:
        self._shape = (rows, num_experts)
        self._paths = {} if paths is None else paths
        self._steps: list[_Step] = []

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch, and note what it made scores from."""
        name = getattr(func, "__name__", "")
        short = name.strip("_")
        made: Any
        written = _written(name, short, args)
        if written is not None and self._is_scores(written):
            made, sources = written, [(written.clone(), written.data_ptr())]
            result = func(*args, **kwargs)
        else:
            given = (*args, *(value for name, value in kwargs.items() if name != "out"))
            found = (value for value in given if isinstance(value, torch.Tensor))
            sources = [(one, one.data_ptr()) for one in found if self._is_scores(one)]
            made = result = func(*args, **kwargs)
        if isinstance(made, torch.Tensor) and self._is_scores(made):
            place = made.data_ptr()
            if written is not None or all(lay != place for _, lay in sources):  # else a view of its source
                may_mask = short in _MAY_MASK and not (short in _COMPUTES and self._learns(args, kwargs))
                self._steps.append(_Step(short, place, made, sources if may_mask else []))
        return result

    def sees(self, scores: torch.Tensor) -> bool:
        """Were these made by a function that was seen?"""
        place = scores.data_ptr()
        return any(step.place == place for step in self._steps)

    def unmasked(self, scores: torch.Tensor, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The scores [rows, experts] before they were masked; themselves where no mask was seen.

        Args:
            own: the router's own choice, [rows, topk]; asked only where the names of the steps leave it open.
        """
        names = tuple(step.name for step in self._steps)
        path = self._paths.get(names)
        if path is None:
            with outside_modes():
                path, is_sure = self._path(scores, own)
            if is_sure:
                self._paths[names] = path
        for step, source in path:
            scores = self._as_scores(self._steps[step].sources[source][0], scores)
        return scores

    def _path(self, scores: torch.Tensor, own: Callable[[], torch.Tensor]) -> tuple[Path, bool]:
        """The steps back from these scores, and whether another call's would be the same."""
        path: Path = []
        masks = 0  # how much of the path leads up to a mask: a step that changes nothing may yet learn
        place, later, is_sure = scores.data_ptr(), scores.detach(), True
        for number in reversed(range(len(self._steps))):
            step = self._steps[number]
            if step.place != place:
                continue
            for source, (tensor, lay) in enumerate(step.sources):
                earlier = self._as_scores(tensor.detach(), later)
                is_mask = step.name in _FILLS and len(step.sources) == 1
                if not is_mask:
                    ids = own()
                    if not torch.equal(earlier.gather(1, ids), later.gather(1, ids)):
                        continue
                    is_mask = not torch.equal(earlier, later)
                    if step.name in _COMPUTES and bool((later > earlier).any()):
                        continue
                    is_sure &= is_mask or step.name in _COPIES
                path.append((number, source))
                masks = len(path) if is_mask else masks
                place, later = lay, earlier
                break
            else:
                break
        return path[:masks], is_sure

    def _learns(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Is one of these a tensor that takes a gradient, but no scores: a bias?"""
        found = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        return any(one.requires_grad and not self._is_scores(_whole(one)) for one in found)

    def _is_scores(self, tensor: torch.Tensor) -> bool:
        rows, experts = self._shape
        return tensor.numel() == rows * experts and tensor.is_floating_point()

    def _as_scores(self, tensor: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(self._shape).to(later.dtype)


def _written(name: str, short: str, args: Sequence[Any]) -> torch.Tensor | None:
    """The tensor that a function of this name writes into, or the one that this is a part of."""
    in_place = short == "setitem" or name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")
    if not in_place or not args or not isinstance(args[0], torch.Tensor):
        return None
    return _whole(args[0])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base
