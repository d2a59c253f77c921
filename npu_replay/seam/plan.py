"""Say how a router takes its top-k, as its last closely watched call did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from npu_replay.seam.call import Call


@dataclass(frozen=True)
class Plan:
    """Describes the calls of a router in eval mode, or in training.

    Attributes:
        way: `Call.way`; where it is the guard, the function mode stays off.
        is_quick: whether unchecked calls may be quick.
        args: arguments of the top-k behind the scores.
        kwargs: its keywords.
    """

    way: str | None
    is_quick: bool
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, call: Call) -> Plan:
        """Return the plan of the calls that follow one like this, which has ended."""
        plain = call.way == "guard" and not call.further and type(call.scores) is torch.Tensor
        if not plain or call.drops or call.spare or call.counts:
            return cls(call.way, False)
        _, args, kwargs = call.taken_by
        return cls(call.way, True, args[1:], {name: kwargs[name] for name in kwargs if name != "input"})
