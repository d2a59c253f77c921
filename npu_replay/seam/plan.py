"""Say what is known of a router's calls before they begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Describes the calls of a router in eval mode, or in training.

    Attributes:
        num_experts: columns of the scores.
        topk: experts a token.
        is_given: the ids may differ from the router's own choice.
        drops: tokens over an expert's capacity are dropped by a second top-k, along dim 0.
        spare: experts that the top-k returns beyond those used; they come last and aren't replaced.
        leaves: see `Router.leaves`.
        masks: scores are masked before the top-k.
        is_block: the module has no router inside, so further top-ks are counted.
        inside: code of the function that runs the router; None: the stack isn't looked at.
        way: how the last closely watched call was caught; where it is the guard, the function mode stays off.
        is_quick: whether unchecked calls may be quick.
        args: arguments of the top-k behind the scores, for quick calls.
        kwargs: its keywords.
    """

    num_experts: int
    topk: int
    is_given: bool = False
    drops: bool = False
    spare: int = 0
    leaves: int = 0
    masks: bool = False
    is_block: bool = False
    inside: CodeType | None = None
    way: str | None = None
    is_quick: bool = False
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
