"""What a model is called with, held against the tokens and images that its routes belong to.

Two micro-batches of one shape that have changed places look alike to a router, and so do rows that are
padded on the other side. Their token ids don't, nor do images of one size with the same token ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from npu_replay.routes.fingerprint import fingerprint, same_tokens
from npu_replay.routes.input_digest import digest, other_inputs

if TYPE_CHECKING:
    from npu_replay.routes.routed_experts import RoutedExperts

Others: TypeAlias = "dict[str, tuple[torch.Size, torch.Tensor | int]]"
_NAMES = ("input_ids", "tokens")


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

    @classmethod
    def of(cls, routes: RoutedExperts) -> Inputs | None:
        """Return those of a micro-batch's routes; of one sequence with a fingerprint, its tokens."""
        if routes.inputs is not None or routes.fingerprint is None:
            return routes.inputs
        return cls(torch.arange(len(routes)), (len(routes),), (routes.fingerprint,))

    def differing(self, called: Called) -> list[str] | None:
        """Return the names of the inputs that are others than these; None where no tokens can be compared: a
        sequence that is fed in part isn't. `called` is what `on_host` returned."""
        tokens = called.tokens.flatten().long()
        fed = torch.arange(self.lengths[0]) if self.fed is None else self.fed
        if len(tokens) != len(fed):
            # No token ids of a layout's batch; rows that don't fit are found by the routers.
            return ["tokens"] if self.fed is None else None
        there = fed >= 0
        packed = torch.zeros(sum(self.lengths), dtype=torch.int64)
        packed[fed[there]] = tokens[there]
        here = torch.zeros(len(packed), dtype=torch.bool).index_fill(0, fed[there], True)
        spans = pairwise(accumulate(self.lengths, initial=0))
        same = [
            same_tokens(fingerprint(packed[first:end]), mark)  # a call doesn't tell its sample_key
            for (first, end), mark in zip(spans, self.marks, strict=True)
            if mark is not None and here[first:end].all()
        ]
        ours = called.others if self.others is None else self.others
        found = [] if all(same) else ["tokens"]
        found += sorted(name for name in ours | called.others if ours.get(name) != called.others.get(name))
        return found if same else None


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of a module's positional arguments; of a wrapper (DDP), of the inner one."""
    parameters = inspect.signature(module.forward).parameters.items()
    names = [name for name, one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    inner = getattr(module, "module", None)
    return parameter_names(inner) if not names and isinstance(inner, nn.Module) else names or ["input_ids"]


def copied(args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module | None = None) -> Called | None:
    """Return what a model is called with, its token ids copied; None if it gets no token ids.

    They are the argument named input_ids or tokens, or the first one if it is [batch, sequence]. What an
    attention_mask of that shape leaves out counts as 0: padding ids may differ from pass to pass. Positional
    arguments have the names that the module's forward gives them.
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
