"""See what a router does with its scores and its ids: masks before the top-k, uses of the ids after it.

`seam.Watch` shows each function of torch that a router calls.

Masks: a replayed expert may lie in a group that the router masked; it then needs its own score, not the
mask's number. `Masks` walks back from the argument of the top-k. A function is a mask by its effect: it
changed some scores and left the others. One that computes (a sum, a product) must also lower them by much
or to 0, unlike an expert bias or a scale. It was a mask only in rows where all that it changed lies below
the router's choice: in a row of padding that is filled with zeros the choice itself is among zeros. A mask
whose result goes through another function before the top-k (a softmax, a bias) can't be undone: an expert
that it ruled out is reported, as its weight has no meaning.

Uses of the ids: where the router is a whole block, its output shows no ids. But they reach its experts
through functions of torch (`one_hot`, `gather`, a cast for a kernel). So every integer tensor [rows, topk]
that one of these is given after the top-k must hold the ids, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from npu_replay.sessions.torch_state import address, outside_modes

_FILLS = frozenset({"masked_fill", "where"})
_WRITES = frozenset(
    {"setitem", "index_put", "index_fill", "index_copy", "scatter", "masked_scatter", "copy", "fill", "zero"}
)
_COPIES = frozenset({"clone", "contiguous", "to", "type", "float", "double", "half", "bfloat16", "cat"})
_MOVES = _FILLS | _WRITES | _COPIES | {"minimum", "fmin"}
"""Functions that only place scores and numbers; all others compute."""

Own: TypeAlias = "Callable[[], torch.Tensor]"
"""Returns the router's own choice, int64 [rows, topk]."""


class _Step(NamedTuple):
    """Describes one function call. It holds the tensors, so that their memory isn't reused."""

    name: str
    place: int  # address of its result
    made: torch.Tensor
    sources: list[tuple[torch.Tensor, int]]  # its arguments, and their addresses at the time
    learns: bool


_Scores: TypeAlias = "tuple[int, int]"
"""A tensor of scores: the number of a step, and of one of its sources; -1 stands for the step's result."""


class Path(NamedTuple):
    """Lists the masks of a router: numbers of steps, and the scores that each has masked."""

    open: list[tuple[int, _Scores]]  # from the top-k back to the last mask that can be undone
    shut: list[tuple[int, _Scores]]  # earlier masks, whose scores went through another function


class Masks:
    """Records the steps by which one call of a router makes its scores [rows, num_experts].

    `paths` holds where the masks were in earlier calls of the router, by the names of all steps.
    """

    # Names of the steps, and the masks of this call. A recompute takes its forward's, since the tensors that
    # autograd saves must not depend on what a mask covers.
    used: tuple[tuple[str, ...], Path] | None = None

    def __init__(self, rows: int, num_experts: int, paths: dict[tuple[str, ...], Path] | None = None) -> None:
        self._shape = (rows, num_experts)
        self._paths = {} if paths is None else paths
        self._steps: list[_Step] = []

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch, and keep it as a step if it makes scores, or writes into them."""
        name = getattr(func, "__name__", "")
        short = name.strip("_")
        in_place = short == "setitem" or name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")
        written = _whole(args[0]) if in_place and args and isinstance(args[0], torch.Tensor) else None
        made: Any
        if written is not None and self._is_scores(written):
            made, sources = written, [(written.clone(), address(written))]
            if short == "copy":  # what it overwrites may be anything, scores of an earlier call too
                copied = (one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.Tensor))
                sources += [(one, address(one)) for one in copied if self._is_scores(one)]
            result = func(*args, **kwargs)
        else:
            passed = (*args, *(value for name, value in kwargs.items() if name != "out"))
            found = (value for value in passed if isinstance(value, torch.Tensor))
            sources = [(one, address(one)) for one in found if self._is_scores(one)]
            made = result = func(*args, **kwargs)
        if isinstance(made, torch.Tensor) and self._is_scores(made):
            place = address(made)
            if written is not None or all(lay != place for _, lay in sources):  # else a view of its source
                given = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
                learns = short not in _MOVES and any(
                    one.requires_grad and not self._is_scores(_whole(one)) for one in given
                )
                self._steps.append(_Step(short, place, made, sources, learns))
        return result

    def sees(self, scores: torch.Tensor) -> bool:
        place = address(scores)
        return any(step.place == place for step in self._steps)

    def unmasked(
        self, scores: torch.Tensor, own: Own, take: Callable[[torch.Tensor], torch.Tensor] = lambda part: part
    ) -> torch.Tensor:
        """Return the scores [rows, experts] before they were masked; unchanged where no mask was seen.

        `take` returns the wanted part of scores, row by row. `own` is called only where a mask may have been
        seen.
        """
        values, kept = take(scores), None
        for earlier, later, step in self._pairs(self._path(scores, own).open, scores):
            with outside_modes():
                keeps = _keeps(step.name, earlier.detach(), later.detach(), own())
                kept = keeps if kept is None else kept & keeps
            values = torch.where(kept, take(earlier), values)
        return values

    def ruled_out(self, scores: torch.Tensor, own: Own, ids: torch.Tensor) -> torch.Tensor | None:
        """Return bool [rows, topk]: which of these ids have a weight that was made from a mask's number.

        None where no such mask was seen. Call it outside of modes.
        """
        found = None
        for earlier, later, step in self._pairs(self._path(scores, own).shut, scores):
            earlier, later = earlier.detach(), later.detach()
            differ = _keeps(step.name, earlier, later, own()) & (
                earlier.gather(1, ids) != later.gather(1, ids)
            )
            found = differ if found is None else found | differ
        return found

    def _pairs(self, steps: list[tuple[int, _Scores]], scores: torch.Tensor) -> Any:
        for number, before in steps:
            yield self._scores(before, scores)[0], self._after(number, scores), self._steps[number]

    def _scores(self, which: _Scores, like: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the tensor [rows, experts], and its address at that step."""
        number, source = which
        if source < 0:
            return self._after(number, like), self._steps[number].place
        tensor, lay = self._steps[number].sources[source]
        return tensor.reshape(self._shape).to(like.dtype), lay

    def _after(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return the result of a step; a later write in place has kept a copy of what it overwrote."""
        place, made = self._steps[number].place, self._steps[number].made
        for step in self._steps[number + 1 :]:
            if step.place == place and step.sources and step.sources[0][1] == place:
                made = step.sources[0][0]
                break
        return made.reshape(self._shape).to(like.dtype)

    def _path(self, scores: torch.Tensor, own: Own) -> Path:
        """Return where the masks of these scores are: known by the names of the steps, or found now."""
        names = tuple(step.name for step in self._steps)
        if self.used is not None and self.used[0] == names:
            return self.used[1]
        if (path := self._paths.get(names)) is not None:
            self.used = names, path
            return path
        path, masks = Path([], []), 0  # masks: length of the open path up to its last mask
        place, later = address(scores), scores.detach()
        is_open = is_sure = True  # sure: it holds for other calls, too
        with outside_modes():
            for number in reversed(range(len(self._steps))):
                step = self._steps[number]
                if step.place != place:
                    continue
                before, is_mask = self._judge(number, later, own)
                if before is None:
                    is_open, is_sure = False, is_sure and step.name not in _WRITES
                    if len(step.sources) != 1:
                        break
                    before = number, 0
                else:
                    is_sure &= is_mask or step.name in _COPIES
                    if is_open:
                        path.open.append((number, before))
                        masks = len(path.open) if is_mask else masks
                    elif is_mask:
                        path.shut.append((number, before))
                later, place = self._scores(before, scores)
                later = later.detach()
        del path.open[masks:]
        if is_sure:
            self._paths[names] = path
        self.used = names, path
        return path

    def _judge(self, number: int, later: torch.Tensor, own: Own) -> tuple[_Scores | None, bool]:
        """Return which scores this step may have masked, and whether it changed any of them.

        They are among its arguments; or, where it got parts of them, among the results of earlier steps.
        """
        step, most, found, is_mask = self._steps[number], 0, None, False
        if step.learns:
            return None, False
        if step.name in _FILLS and len(step.sources) == 1:
            return (number, 0), True
        # Of two sources with equal scores, the one that needs grad leads to the router's weights.
        for source in sorted(
            range(len(step.sources)), key=lambda one: not step.sources[one][0].requires_grad
        ):
            earlier = self._scores((number, source), later)[0].detach()
            keeps = _keeps(step.name, earlier, later, own())
            if (count := int(keeps.sum())) > most:
                most, found = count, (number, source)
                is_mask = bool((keeps & (earlier != later)).any())
        for before in reversed(range(number)) if found is None else ():
            earlier = self._after(before, later).detach()
            if bool((_keeps(step.name, earlier, later, own()) & (earlier != later)).any()):
                return (before, -1), True
        return found, is_mask

    def _is_scores(self, tensor: torch.Tensor) -> bool:
        rows, experts = self._shape
        return tensor.numel() == rows * experts and tensor.is_floating_point()


def _keeps(name: str, earlier: torch.Tensor, later: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return bool [rows, 1]: in which rows this step may have been a mask.

    What it changed must lie below all that the router chose, except equal scores, as in a row of zeros.
    """
    # In a row of equal zeros the router chooses some that were filled, or others that are as good.
    chosen = later.gather(1, own)
    rules_out = later < chosen.amin(dim=1, keepdim=True)
    if name not in _MOVES:
        # A mask lowers by more than the range of scores (-1e4, -inf), or multiplies by 0; a bias doesn't.
        lowers = earlier - later > 2 * chosen.abs().amax(dim=1, keepdim=True)
        rules_out &= lowers | ((later == 0) & (later < earlier))
    return (rules_out | (earlier == later)).all(dim=1, keepdim=True)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


class IdUses:
    """Checks the integer tensors [rows, topk] that torch's functions are given in one call of a block.

    They must hold `ids`, which are never written into; None: the content of the first of them.
    """

    depth = 0  # of torch's mode stack when `follow` was called

    def __init__(self, rows: int, topk: int, num_experts: int, ids: torch.Tensor | None = None) -> None:
        self.count = 0  # tensors so far
        self._shape, self._num_experts, self._ids = (rows, topk), num_experts, ids
        self._held: torch.Tensor | None = None
        # In such a small batch a mask over experts, or the list of used experts, may have this shape, too.
        self._first_alone = rows == topk or (topk == 1 and rows <= num_experts)

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return for each such tensor among these arguments a bool [rows, topk]: which ids it holds."""
        if self._first_alone and self.count:
            return []
        held: list[torch.Tensor] = []
        for one in _tensors(args, kwargs):
            dtype = one.dtype
            if (
                one.shape != self._shape
                or (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
                # Stride 0 is a row index that was expanded to the shape of the ids.
                or (one.stride(1) == 0 and self._shape[1] > 1)
            ):
                continue
            with outside_modes():
                if self._ids is None:
                    self._ids = one.clone()
                held.append(one.to(self._ids) == self._ids)
        return held

    def add(self, held: Sequence[torch.Tensor]) -> None:
        """Count tensors that a function has used to make a tensor."""
        self.count += len(held)
        with outside_modes():
            for one in held:
                self._held = one if self._held is None else self._held & one

    def shown(self) -> torch.Tensor:
        """Return bool [rows, experts]: the ids that all of the tensors held; none if there was no tensor."""
        rows, experts = self._shape[0], self._num_experts
        if self._held is None or self._ids is None:
            return torch.zeros(rows, experts, dtype=torch.bool)
        inside = self._held & (self._ids >= 0) & (self._ids < experts)
        shown = torch.zeros(rows, experts + 1, dtype=torch.bool, device=self._ids.device)
        return shown.scatter(1, self._ids.where(inside, experts).long(), True)[:, :experts]


def run_seen(
    takers: Sequence[IdUses], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a function of torch; one that makes no tensor of the ids (`size`, `device`) hasn't used them."""
    held = [taken.holds(args, kwargs) for taken in takers]  # before the call, which may write into them
    result = func(*args, **kwargs)
    if any(held) and any(True for _ in _tensors((result,), {})):
        for taken, mine in zip(takers, held, strict=True):
            taken.add(mine)
    return result


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments, and in lists and tuples there (an index of several)."""
    for value in (*args, *kwargs.values()):
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, torch.Tensor):
                yield one
