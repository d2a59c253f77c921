"""What a model is called with, held against the tokens and images that its routes belong to.

Two micro-batches of one shape that have changed places look alike to a router, and so do rows that are
padded on the other side. Their token ids don't, nor do images of one size with the same token ids.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from npu_replay.errors import MicroBatchError, micro_batch
from npu_replay.routes.fingerprint import fingerprint
from npu_replay.routes.input_digest import digest, other_inputs

if TYPE_CHECKING:
    from npu_replay.routes.routed_experts import RoutedExperts

Others: TypeAlias = "dict[str, tuple[torch.Size, torch.Tensor | int]]"
_NAMES = ("input_ids", "tokens")
logger = logging.getLogger(__name__)


class Called(NamedTuple):
    """What a model was called with: a copy of its ids, and shape and digest of each other input."""

    tokens: torch.Tensor
    others: Others

    def on_host(self) -> Called:
        """Wait for the device, and return the same in memory of the host."""
        return Called(self.tokens.cpu(), {name: (one[0], int(one[1])) for name, one in self.others.items()})


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tokens that routes belong to, as a model is called with them.

    Attributes:
        fed: int64 [tokens fed], the packed token in each place, or -1 for padding; None where they are one
            sequence, in the order of memory (of a record).
        lengths: tokens of each sequence.
        marks: the fingerprint of each sequence; None for one that isn't checked.
        others: shape and digest of each other input; None where they aren't known.
    """

    fed: torch.Tensor | None
    lengths: tuple[int, ...]
    marks: Sequence[int | None]
    others: Others | None = None

    @classmethod
    def recorded(cls, called: Called) -> Inputs:
        """Return those of a forward that was recorded, which `Called.on_host` gave."""
        tokens = called.tokens
        return cls(None, (tokens.numel(),), (fingerprint(tokens.flatten()),), called.others)

    def differing(self, called: Called) -> list[str] | None:
        """Return the names of the inputs that are others than these; None where no tokens can be compared: a
        sequence that is fed in part isn't. `called` is what `on_host` returned."""
        tokens = called.tokens.flatten().long()
        fed = torch.arange(sum(self.lengths)) if self.fed is None else self.fed
        if len(tokens) != len(fed):
            return None  # no token ids of this batch; rows that don't fit are found by the routers
        there = fed >= 0
        packed = torch.zeros(sum(self.lengths), dtype=torch.int64)
        packed[fed[there]] = tokens[there]
        here = torch.zeros(len(packed), dtype=torch.bool).index_fill(0, fed[there], True)
        spans = pairwise(accumulate(self.lengths, initial=0))
        same = [
            fingerprint(packed[first:end]) >> 32 == mark >> 32  # a call doesn't tell its sample_key
            for (first, end), mark in zip(spans, self.marks, strict=True)
            if mark is not None and here[first:end].all()
        ]
        ours = called.others if self.others is None else self.others
        others = sorted(name for name in ours | called.others if ours.get(name) != called.others.get(name))
        return (others if all(same) else ["tokens", *others]) if same else None


class InputCheck:
    """Holds the calls of a replay against the inputs of their routes.

    Attributes:
        known: of each micro-batch, the inputs of its routes; None where they don't say.
        compared: micro-batches whose tokens were compared.
    """

    def __init__(self, routes: Sequence[RoutedExperts]) -> None:
        self.known = [one.inputs for one in routes]
        for number, one in enumerate(routes):
            if one.inputs is None and one.fingerprint is not None:
                self.known[number] = Inputs(None, (len(one),), (one.fingerprint,))
        self.compared = 0

    def check(self, number: int, given: Called) -> None:
        """Refuse a micro-batch that was called with other inputs than those of its routes."""
        inputs, called = self.known[number], given.on_host()
        found = inputs.differing(called) if inputs else None
        self.compared += found is not None
        if found:
            problem = "the model was called with other tokens than those that the routes belong to"
            others = [n for n, one in enumerate(self.known) if one and one.differing(called) == []]
            raise MicroBatchError(
                problem.replace("tokens", " and ".join(found)),
                where=micro_batch(number),
                expected="the tokens and images of the record, or of the fingerprints, in their places",
                got=f"those of the routes of {micro_batch(others[0])}" if others else "others",
                cause="an evaluation or a reference pass inside the block, which belongs outside; "
                "micro-batches in another order than their routes (a shuffle, dynamic batches); padding on "
                "another side, to another length or with other ids; or fingerprints of more tokens than the "
                "model is fed. record(inputs=False), or a layout without fingerprints, checks none",
            )

    def warn(self, chunks: Sequence[nn.Module]) -> None:
        """Warn where routes know their tokens and no call told its own, but not in a later pipeline stage."""
        modules = (one for chunk in chunks for one in chunk.modules())
        unchecked = any(self.known) and not self.compared
        if unchecked and all(getattr(one, "pre_process", True) for one in modules):
            logger.warning(
                "[npu_replay] no micro-batch was held against the tokens that its routes belong to: the "
                "module of this block isn't called with all token ids. Open the block on the one that is"
            )


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of a module's positional arguments; of a wrapper (DDP), of the inner one."""
    parameters = inspect.signature(module.forward).parameters.items()
    names = [name for name, one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    inner = getattr(module, "module", None)
    return parameter_names(inner) if not names and isinstance(inner, nn.Module) else names or ["input_ids"]


def copied(args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None = None) -> Called | None:
    """Return what a model is called with, its token ids copied; None if it gets no token ids.

    They are the argument named input_ids or tokens, or the first one if it is [batch, sequence]. What an
    attention_mask of that shape leaves out counts as 0: padding ids may differ from pass to pass. The
    module's forward names positional arguments.
    """
    names = parameter_names(module) if args and module is not None else []
    names += [f"argument {number}" for number in range(len(names), len(args))]
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    first = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].dim() > 1 else None
    found = next((call[name] for name in _NAMES if isinstance(call.get(name), torch.Tensor)), first)
    if found is None or found.dtype not in (torch.int64, torch.int32) or type(found) is not torch.Tensor:
        return None
    if found.is_nested or found.dim() == 0:
        return None
    others: Others = {name: (one.shape, digest(one)) for name, one in other_inputs(call, found).items()}
    mask = call.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == found.shape:
        return Called(found.detach() * (mask != 0), others)
    # Loaders and captured graphs write the next batch into the same memory.
    return Called(found.detach().clone(), others)
