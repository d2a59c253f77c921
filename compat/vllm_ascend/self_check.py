"""Compares the first steps of an engine with the routers' own logits.

The rows are compared as they are returned, in the batch's order and after all ranks' are merged: so a wrong
expert, place, layer, rank or step shows. The reference is a top-k, computed here, of the logits at the
layer's input. A captured graph has no logits to read; there every row must be written in that very step, by
one rank. A way of communication that comes up later is checked anew: it depends on the number of tokens, and
has its own places.
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
"""The steps that are checked."""
COMPARED = 3
"""The number of these steps that are compared with logits, if that many run eagerly."""
_NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""The relative distance, by dtype of the logits, within which scores may change places: not every way of
choosing widens bfloat16 first, which keeps eight bits of a score."""
FEWEST = 8
"""The least number of tokens that are compared with logits: one of them may always differ."""
_MAY_DIFFER = 1 / 50
"""The share of a layer's rows that may differ from the top-k in one step."""

_REPORT = "Without NPU_REPLAY_VLLM_ASCEND the engine runs as released; please report it"


@dataclass(frozen=True)
class Choice:
    """Describes how a layer chooses its experts, by «softmax», «sigmoid» or «sqrtsoftplus» scores.

    `bias`, shape (experts,), is added to the scores for the choice only. Experts form `groups` of equal size,
    and the best `kept` groups are chosen from.
    """

    top_k: int
    scoring: str
    bias: torch.Tensor | None = None
    groups: int = 1
    kept: int = 1


def expected(logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted experts, (rows, k), that logits (rows, experts) choose, and the certain rows."""
    # A row is uncertain if its last chosen score is close to the next.
    near = _NEAR[logits.dtype]
    scores = _SCORES[choice.scoring](logits.float())
    if choice.bias is not None:
        scores = scores + choice.bias.to(logits.dtype).float()
    sure = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    if choice.groups > choice.kept:
        # A group is as good as its two best (group_select_mode=1).
        by_group = scores.reshape(len(scores), choice.groups, -1)
        of_group = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        best = of_group.topk(choice.kept + 1, dim=-1)
        kept = best.indices[:, :-1]
        # A release that scores a group by its best expert only may choose other groups.
        by_best = by_group.amax(-1).topk(choice.kept, dim=-1).indices
        sure = (by_best.sort(dim=-1).values == kept.sort(dim=-1).values).all(-1)
        sure &= ~_close(best.values, near)
        left = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, kept, True)
        scores = by_group.masked_fill(~left.unsqueeze(-1), -torch.inf).flatten(-2)
    best = scores.topk(choice.top_k + 1, dim=-1)
    sure &= ~_close(best.values, near)
    return best.indices[:, :-1].sort(dim=-1).values, sure


def _close(best: torch.Tensor, near: float) -> torch.Tensor:
    """Return whether the last chosen score and the next, of (rows, k + 1), are near; those of NaN are."""
    last = best[:, -2]
    next_one = best[:, -1]
    return ~((last - next_one).abs() > near * last.abs())


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


class SelfCheck:
    """Checks the first `steps`, and logs once that all was right, on the rank that `speaks`.

    Args:
        layers: the decoder layers that route, each with its name in the model («model.layers.3.mlp»).
        group: vLLM's coordinator of the tensor-parallel group, if its ranks may have different rows; else
            None. Its `device_group` is read each time: sleep mode may destroy it and make another.
        where: whose routes they are, for messages: «vllm-ascend 0.23.0».
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
        self._speaks = speaks
        self._each = self._left = steps
        self._seen = 0
        self._to_compare = COMPARED
        self._ways: set[str] = set()
        self._again = False
        self._expected: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._twice: dict[int, torch.Tensor] = {}
        self._compared: set[int] = set()
        self._eager = 0
        self._writers = torch.empty(0, device="cpu")

    @property
    def ground(self) -> int:
        """Return the value of a row that wasn't written."""
        return -1 if self._left else 0

    @property
    def compares(self) -> bool:
        """Return whether choices of this step are compared with logits, if it runs eagerly."""
        return self._left > 0 and self._to_compare > 0

    def begin(self) -> None:
        """Begin a step, and forget choices of a dummy run since the last one."""
        self._expected.clear()
        self._twice.clear()
        if self._again:
            self._again = False
            self._left = self._each

    def way(self, comm: str) -> None:
        """Note the way in which tokens are sent to experts, or «graph»."""
        # If it is new, and too few steps are left to see it, further ones are checked.
        if comm not in self._ways:
            self._ways.add(comm)
            self._to_compare = COMPARED
            self._again |= self._left < min(COMPARED, self._each)

    def expect(self, layer: int, logits: torch.Tensor, choice: Choice, row: int) -> None:
        """Remember what logits, (tokens, experts), choose; `row` is the first token's in the batch."""
        known = choice.scoring in _SCORES and logits.dtype in _NEAR and len(logits) >= FEWEST
        if not self.compares or not known or choice.top_k >= logits.shape[-1]:
            return
        ids, sure = expected(logits, choice)
        if layer in self._expected:
            earlier = self._expected[layer][0]
            same = earlier.shape == ids.shape
            self._twice[layer] = (
                (earlier != ids).any(-1).sum() if same else torch.tensor(len(ids), device=ids.device)
            )
        self._expected[layer] = (ids, sure, row)

    def slots(self, slots: torch.Tensor, positions: Collection[int], block: int) -> None:
        """Check the slots of the KV cache, under which rows are kept, against their tokens' positions."""
        # A token has the same place in its block of the cache as its slot.
        slot_numbers = slots.tolist()
        offsets = sorted(slot % block for slot in slot_numbers)
        expected = sorted(at % block for at in positions)
        ReplayError.unless(
            offsets == expected
            and len(set(slot_numbers)) == len(slot_numbers)
            and min(slot_numbers, default=0) >= 0,
            f"the slots of step {self._seen + 1} aren't those of its tokens",
            where=f"routes of {self._where}, all layers",
            expected=f"{len(expected)} slots, at {expected[:8]}",
            got=f"{len(slot_numbers)} slots, at {offsets[:8]}",
            cause="another KV cache group's slots, or rows that don't go with them. " + _REPORT,
        )

    def before_merge(self, rows: torch.Tensor) -> None:
        """Count the ranks that wrote each row; shape (tokens, decoder layers, k)."""
        if not self._left:
            return
        own = rows[:, list(self._layers)]
        # Until the merge an unwritten row holds -1 (`ground`).
        self._writers = (own >= 0).all(-1).int()
        if self._group is not None:
            dist.all_reduce(self._writers, dist.ReduceOp.SUM, group=self._group.device_group)

    def after_merge(self, rows: torch.Tensor) -> None:
        """Check the rows of all ranks, and set zeros where nothing routes; all ranks raise together."""
        if not self._left:
            return
        # Of each fault, the number of rows per layer that have it.
        own = rows[:, list(self._layers)]
        apart = (own < 0).any(-1) & (self._writers > 0)
        ids = own.sort(-1).values
        faults = [
            ((self._writers == 0).sum(0), "were written by no rank: a layer or tokens are missing"),
            ((self._writers > 1).sum(0), "were written by more than one rank"),
            (apart.sum(0), "weren't put together from all ranks"),
            ((ids >= self._experts).any(-1).sum(0), f"have an expert above {self._experts - 1}"),
            ((ids[..., 1:] == ids[..., :-1]).any(-1).sum(0), "have one expert twice"),
        ]
        self._refuse(faults)
        # Of each layer, the rows that differ from the logits, if more than precision explains.
        wrong = torch.zeros(len(self._layers), dtype=torch.int64, device=rows.device)
        for place, layer in enumerate(self._layers):
            if layer in self._expected:
                chosen, sure, row = self._expected[layer]
                of_layer = rows[row : row + len(chosen), layer].sort(-1).values
                differ = (of_layer != chosen[: len(of_layer)]).any(-1) & sure[: len(of_layer)]
                allowed = max(1, int(_MAY_DIFFER * len(of_layer)))
                wrong[place] = torch.where(differ.sum() > allowed, differ.sum(), 0)
        none = torch.tensor(0, device="cpu")
        again = torch.stack([self._twice.get(layer, none).to(rows.device) for layer in self._layers])
        counts = torch.stack([again, wrong]).int()
        if self._group is not None:
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=self._group.device_group)
        other = "were chosen twice, and otherwise: by another layer, such as a draft's, taken for it"
        words = "aren't the top-k of the router's logits: other experts, or other tokens' rows"
        self._refuse([(counts[0], other), (counts[1], words)])
        order = list(self._expected)
        ReplayError.unless(
            order == sorted(order),
            f"in step {self._seen + 1}, layers chose in the order {order}",
            where=f"routes of {self._where}",
            expected="ascending numbers, as layers run",
            got=order,
            cause="two layers were mixed up. " + _REPORT,
        )
        rows.clamp_(min=0)
        self._eager += bool(self._expected)
        self._to_compare -= bool(self._expected)
        self._compared |= set(self._expected)
        self._expected.clear()
        self._left -= 1
        self._seen += 1
        if not self._left and self._speaks:
            unseen = len(self._layers) - len(self._compared)
            logger.warning(
                "[npu_replay] routes of %d layers are captured on %s. Checked over %d steps: every row "
                "written; ids held against the routers' logits in %d of them%s",
                *(len(self._layers), self._where, self._seen, self._eager),
                f", but not of {unseen} layers, which choose in a way of their own" if unseen else "",
            )

    def _refuse(self, refused: Collection[tuple[torch.Tensor, str]]) -> None:
        for count, words in refused:
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
