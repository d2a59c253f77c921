"""What npu_replay raises: one family, every message in the same order."""

from __future__ import annotations

import operator
from typing import Any


class ReplayError(RuntimeError):
    """Routing replay can't be done right, so it isn't done.

    The message says where it happened, what is wrong, what was expected, what came instead and what
    usually causes it. Parts that don't apply are left out.
    """

    shared = False
    """Do all ranks of the job know of it, and leave with it or with one line about it?"""

    def __init__(
        self,
        problem: str,
        *,
        where: str = "",
        expected: object = None,
        got: object = None,
        cause: str = "",
    ) -> None:
        self.problem = problem
        self.where = where
        self.expected = expected
        self.got = got
        self.cause = cause
        message = f"{where}: {problem}" if where else problem
        if expected is not None:
            message += f". Expected {expected}, got {got}"
        if cause:
            message += f". Usual cause: {cause}"
        super().__init__(f"[npu_replay] {message}")

    @property
    def line(self) -> str:
        """Where and what, for those who see the whole message elsewhere."""
        return f"{self.where}: {self.problem}" if self.where else self.problem


class InvalidRoutes(ReplayError):
    """The routes themselves are wrong: shape, range, a duplicate, a constant layer."""


class RouteFileError(ReplayError):
    """A file or a byte string isn't what `save` or `to_bytes` made, or may not be overwritten."""


class RouterError(ReplayError):
    """The model's routers don't fit: none found, one that can't be replayed, labels or sizes that differ."""


class MicroBatchError(ReplayError):
    """Forwards and routes don't pair up: too many, too few, or another number of tokens."""


class NoEffect(ReplayError):
    """A router's own output doesn't show the experts it was told to use."""


class RecomputeError(ReplayError):
    """A recompute in backward can't be given the routes of its own forward."""


def whole_number(value: Any, what: str, where: str = "") -> int:
    """`value` as an int, numpy's and torch's integers too; a ReplayError for anything else."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise ReplayError(
            f"{what} must be a whole number", where=where, expected="an integer", got=repr(value)
        ) from error


def micro_batch(number: int, layer: object = None) -> str:
    """«micro-batch 2, layer 5»: where an error happened, in the words of every message."""
    return f"micro-batch {number}" if layer is None else f"micro-batch {number}, layer {layer}"


def described(function: object) -> str:
    """«mindspeed.core.transformer.moe.moe_utils.topk_softmax_with_capacity»: whose function this is."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or '?'}.{name}"
