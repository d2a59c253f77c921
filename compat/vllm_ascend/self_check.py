"""The first steps of an engine are held against the routers' own logits.

What is compared are the rows as they are handed out, in the batch's order and after all ranks' are together:
so a wrong expert, place, layer, rank or step shows. Truth is a top-k of the logits as they came into the
layer, worked out here. A step that runs as a captured graph has no logits to look at; there every row has to
be written in that very step, by one rank. A way of communication that comes up later is looked at anew: it
changes with the number of tokens, and has its own places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)

STEPS = 16
"""So many steps are looked at."""
COMPARED = 3
"""So many of them are held against logits, if so many run eagerly."""
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Scores of logits in that dtype so near to each other, relatively, may change places: not every way to
choose widens bfloat16 first, which keeps eight bits of a score."""
FEWEST = 8
"""Fewer tokens aren't held against logits: one of them may always differ."""
_MAY_DIFFER = 1 / 50
"""The share of a layer's rows that may differ from the top-k in one step."""

_REPORT = "Without NPU_REPLAY_VLLM_ASCEND the engine runs as released; please report it"


@dataclass(frozen=True)
class Choice:
    """How a layer chooses its experts.

    Attributes:
        top_k: experts a token.
        scoring: «softmax», «sigmoid», «sqrtsoftplus».
        bias: added to the scores for the choice alone; shape (experts,).
        groups, kept: experts stand in so many groups of equal size, and the best `kept` are chosen from.
    """

    top_k: int
    scoring: str
    bias: torch.Tensor | None = None
    groups: int = 1
    kept: int = 1


def expected(logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that these logits choose, and of which rows that is beyond doubt.

    Args:
        logits: shape (rows, experts).

    Returns:
        Sorted ids, int64, shape (rows, k); and bool, shape (rows,): no two scores at the edge are near.
    """
    near = _NEAR[logits.dtype]
    scores = _SCORES[choice.scoring](logits.float())
    if choice.bias is not None:
        scores = scores + choice.bias.to(logits.dtype).float()
    sure = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    if choice.groups > choice.kept:
        scores, sure = _within_groups(scores, choice, near)
    best = scores.topk(choice.top_k + 1, dim=-1)
    sure &= ~_close(best.values, near)
    return best.indices[:, :-1].sort(dim=-1).values, sure


def _within_groups(scores: torch.Tensor, choice: Choice, near: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Only experts of the best groups; a group is as good as its two best (group_select_mode=1)."""
    by_group = scores.reshape(len(scores), choice.groups, -1)
    of_group = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
    best = of_group.topk(choice.kept + 1, dim=-1)
    sure = ~_close(best.values, near)
    # a release that takes a group's best expert for its score may choose other groups
    by_best = by_group.amax(-1).topk(choice.kept, dim=-1).indices.sort(dim=-1).values
    sure &= (by_best == best.indices[:, :-1].sort(dim=-1).values).all(-1)
    kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, best.indices[:, :-1], True)
    return by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2), sure


def _close(best: torch.Tensor, near: float) -> torch.Tensor:
    """Are the last that is chosen and the first that isn't as good as each other? Shape (rows, k + 1). Scores
    that are no numbers are."""
    last, next_one = best[:, -2], best[:, -1]
    return ~((last - next_one).abs() > near * last.abs())


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


class SelfCheck:
    """Looks at the first steps, and says once that all was well.

    Args:
        layers: the decoder layers that route, each with where it stands in the model («model.layers.3.mlp»).
        experts: how many there are to choose from.
        group: vLLM's coordinator of the tensor-parallel group, where its ranks may have different rows; else
            None. Its `device_group` is asked for each time: sleep mode may destroy it and make another.
        where: whose routes they are, for messages: «vllm-ascend 0.23.0».
        steps: so many are looked at; 0: none.
        speaks: says that all was well; one rank of a group does.
    """

    def __init__(
        self,
        layers: Mapping[int, str],
        experts: int,
        group: Any,
        where: str,
        steps: int = STEPS,
        speaks: bool = True,
    ) -> None:
        self._layers = dict(sorted(layers.items()))
        self._experts = experts
        self._group = group
        self._where = where
        self._each = self._left = steps
        self._seen = 0
        self._speaks = speaks
        self._to_compare = COMPARED
        self._ways: set[str] = set()
        self._again = False
        self._expected: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._twice: dict[int, torch.Tensor] = {}
        self._compared: set[int] = set()
        self._eager = 0
        self._writers = torch.empty(0)

    @property
    def ground(self) -> int:
        """What a row has that nobody has written."""
        return -1 if self._left else 0

    @property
    def compares(self) -> bool:
        """Are choices of this step held against logits, if it runs eagerly?"""
        return self._left > 0 and self._to_compare > 0

    def begin(self) -> None:
        """A step starts. What was chosen since the last one, in a dummy run, is nobody's."""
        self._expected.clear()
        self._twice.clear()
        if self._again:
            self._again, self._left = False, self._each

    def way(self, comm: str) -> None:
        """Tokens come to their experts in this way, or a graph runs. If that is new, and there are too few
        steps left to see it, the next ones are looked at."""
        if comm not in self._ways:
            self._ways.add(comm)
            self._to_compare = COMPARED
            self._again |= self._left < min(COMPARED, self._each)

    def expect(self, layer: int, logits: torch.Tensor, choice: Choice, row: int) -> None:
        """Remember what a layer has to choose.

        Args:
            logits: of tokens as they come into the layer; shape (tokens, experts).
            row: the first one's place in the batch.
        """
        known = choice.scoring in _SCORES and logits.dtype in _NEAR and len(logits) >= FEWEST
        if not self.compares or not known or choice.top_k >= logits.shape[-1]:
            return
        ids, sure = expected(logits, choice)
        if layer in self._expected:
            earlier = self._expected[layer][0]
            same = earlier.shape == ids.shape
            self._twice[layer] = (earlier != ids).any(-1).sum() if same else torch.tensor(len(ids))
        self._expected[layer] = (ids, sure, row)

    def slots(self, slots: torch.Tensor, positions: Collection[int], block: int) -> None:
        """Hold the slots of the KV cache, under which rows are kept, against where their tokens stand.

        Args:
            slots: of a step's tokens; shape (tokens,).
            positions: of the same tokens in their sequences, in any order.
            block: tokens in a block of the cache: a token has the same place in its block as its slot.

        Raises:
            ReplayError: they can't be these tokens'.
        """
        told = slots.tolist()
        found, expected = sorted(slot % block for slot in told), sorted(at % block for at in positions)
        if found == expected and len(set(told)) == len(told) and min(told, default=0) >= 0:
            return
        raise ReplayError(
            f"the slots of step {self._seen + 1} aren't those of its tokens",
            where=f"routes of {self._where}, all layers",
            expected=f"{len(expected)} slots, at {expected[:8]} of their blocks",
            got=f"{len(told)} slots, at {found[:8]}",
            cause="another KV cache group's slots, or rows that don't go with them. " + _REPORT,
        )

    def before_merge(self, rows: torch.Tensor) -> None:
        """Count who has written each row; shape (tokens, decoder layers, k)."""
        if not self._left:
            return
        own = rows[:, list(self._layers)]
        self._writers = (own >= 0).all(-1).int()
        if self._group is not None:
            dist.all_reduce(self._writers, dist.ReduceOp.SUM, group=self._group.device_group)

    def after_merge(self, rows: torch.Tensor) -> None:
        """Look at the rows of all ranks, and leave zeros where nothing routes.

        Raises:
            ReplayError: names the layer, how many rows of it are wrong, and what it points to. All ranks of
                the group raise together.
        """
        if not self._left:
            return
        self._refuse(self._covered(rows[:, list(self._layers)]))
        self._refuse(self._chosen(rows))
        order = list(self._expected)
        ReplayError.unless(
            order == sorted(order),
            f"in step {self._seen + 1}, layers chose in the order {order}",
            "ascending numbers: layers run one after the other",
            order,
            "two layers taken for each other. " + _REPORT,
            where=f"routes of {self._where}",
        )
        rows.clamp_(min=0)
        self._eager += bool(self._expected)
        self._to_compare -= bool(self._expected)
        self._compared |= set(self._expected)
        self._expected.clear()
        self._left -= 1
        self._seen += 1
        if not self._left and self._speaks:
            self._say()

    def _covered(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
        """Per layer, how many rows have each fault."""
        apart = (rows < 0).any(-1) & (self._writers > 0)
        ids = rows.sort(-1).values
        return [
            ((self._writers == 0).sum(0), "were written by no rank: a layer or tokens are missing"),
            ((self._writers > 1).sum(0), "were written by more than one rank"),
            (apart.sum(0), "weren't put together from all ranks"),
            ((ids >= self._experts).any(-1).sum(0), f"have an expert above {self._experts - 1}"),
            ((ids[..., 1:] == ids[..., :-1]).any(-1).sum(0), "have one expert twice"),
        ]

    def _chosen(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
        """Per layer, how many rows the logits don't choose, if more than a kernel's precision may do."""
        wrong = torch.zeros(len(self._layers), dtype=torch.int64, device=rows.device)
        for place, layer in enumerate(self._layers):
            if layer in self._expected:
                ids, sure, row = self._expected[layer]
                of_layer = rows[row : row + len(ids), layer].sort(-1).values
                differ = (of_layer != ids[: len(of_layer)]).any(-1) & sure[: len(of_layer)]
                allowed = max(1, int(_MAY_DIFFER * len(of_layer)))
                wrong[place] = torch.where(differ.sum() > allowed, differ.sum(), 0)
        none = torch.tensor(0)
        again = torch.stack([self._twice.get(layer, none).to(rows.device) for layer in self._layers])
        found = torch.stack([again, wrong]).int()
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group.device_group)
        return [
            (found[0], "were chosen twice, and otherwise: by another layer, such as a draft's, taken for it"),
            (found[1], "aren't the top-k of the router's logits: other experts, or other tokens' rows"),
        ]

    def _refuse(self, found: Collection[tuple[torch.Tensor, str]]) -> None:
        for count, words in found:
            counts = count.tolist()
            if any(counts):
                at, rows = next((name, n) for name, n in zip(self._layers, counts, strict=True) if n)
                raise ReplayError(
                    f"in step {self._seen + 1}, {rows} rows of layer {at} {words}",
                    where=f"routes of {self._where}, {self._layers[at]}",
                    expected="each scheduled token's chosen experts",
                    got=f"{sum(n > 0 for n in counts)} of {len(counts)} layers with such rows",
                    cause="a path of this release that npu_replay doesn't know, or somebody's patch of it. "
                    + _REPORT,
                )

    def _say(self) -> None:
        unseen = len(self._layers) - len(self._compared)
        logger.warning(
            "[npu_replay] routes of %d layers are captured on %s. Checked over %d steps: every row written; "
            "ids held against the routers' logits in %d of them%s",
            len(self._layers),
            self._where,
            self._seen,
            self._eager,
            f", but not of {unseen} layers, which choose in a way of their own" if unseen else "",
        )
