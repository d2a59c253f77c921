"""Define the errors of npu_replay: one family, every message in the same order."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_Error = TypeVar("_Error", bound="ReplayError")
_LONGEST = 2000  # characters of the expected or actual value
_ONE_LINE = 500  # characters of a message; a longer one begins a line with its cause
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that are escaped in messages: control characters, and halves of a surrogate pair."""


class ReplayError(RuntimeError):
    """Raised when routing replay can't be done correctly; the base class of all errors here.

    The message says where it happened, what is wrong, what was expected, what came instead and what
    usually causes it. Parts that don't apply are left out.
    """

    shared = False
    """Tells that all ranks of the job know of it, and leave with it or with one line about it."""

    def __init__(
        self, problem: str, *, where: str = "", expected: object = None, got: object = None, cause: str = ""
    ) -> None:
        self.problem = problem = printable(problem)
        self.where = where = printable(f"{where}")
        self.expected = expected
        self.got = got
        self.cause = cause = printable(cause)
        message = f"{where}: {problem}" if where else problem
        if expected is not None:
            message += f". Expected {printable(as_text(expected))}, got {printable(as_text(got))}"
        if cause:
            several = cause.startswith("\n")  # likeliest()
            says = "Usual causes, the likeliest first:" if several else "Usual cause: "
            message += ".\n" if several or len(message) + len(cause) > _ONE_LINE else ". "
            message += says + cause
        super().__init__(f"[npu_replay] {message}")
        if hasattr(self, "add_note"):  # Python 3.11; a traceback shows it, and the message stays one sentence
            self.add_note(cures())

    @classmethod
    def unless(
        cls,
        fine: bool,
        problem: str,
        expected: object = None,
        got: object = None,
        cause: str = "",
        where: str = "",
    ) -> None:
        """Raise an error of this class unless `fine`.

        >>> MicroBatchError.unless(2 < 3, "too many tokens", "below 3", 2)
        """
        if not fine:
            raise cls(problem, where=where, expected=expected, got=got, cause=cause)

    def at(self: _Error, place: object) -> _Error:
        """Return the same error with a place added to `where`."""
        if not str(place) or str(place) in self.where:
            return self
        where = f"{place}, {self.where}" if self.where else str(place)
        return type(self)(self.problem, where=where, expected=self.expected, got=self.got, cause=self.cause)

    @property
    def line(self) -> str:
        """Return place and problem, for readers who see the whole message elsewhere."""
        return f"{self.where}: {self.problem}" if self.where else self.problem


@functools.cache
def cures() -> str:
    """Return where the troubleshooting page lies on this machine: in the wheel, or in the source."""
    here = Path(__file__).parent
    pages = (folder / "docs" / "troubleshooting.md" for folder in (here, here.parent))
    place = next((page for page in pages if page.is_file()), "docs/troubleshooting.md in npu_replay's source")
    return f"Symptoms and cures: {place}, and in Chinese zh/troubleshooting.md beside it"


class InvalidRoutes(ReplayError):
    """Raised when the routes themselves are wrong: shape, range, a duplicate, a constant layer."""


class RouteFileError(ReplayError):
    """Raised when a file or bytes weren't made by `save` or `to_bytes`, or a file may not be overwritten."""


class RouterError(ReplayError):
    """Raised when the model's routers don't fit: none found, not replayable, other labels or sizes."""


class MicroBatchError(ReplayError):
    """Raised when forwards and routes don't pair up: too many, too few, or another number of tokens."""


class NoEffect(ReplayError):
    """Raised when a router's own output doesn't show the experts that it was given."""


class RecomputeError(ReplayError):
    """Raised when a recompute in backward can't be given the routes of its own forward."""


def likeliest(*causes: str) -> str:
    """Return several causes as a list, for the `cause` of an error; the likeliest comes first.

    >>> print(ReplayError("no routes", cause=likeliest("a slip", "a fault")))
    [npu_replay] no routes.
    Usual causes, the likeliest first:
    - a slip
    - a fault
    """
    return "".join(f"\n- {cause}" for cause in causes)


RECUT = (
    "the update cuts the batch into other micro-batches than the pass that recorded: collect() returns the "
    "routes of whole sequences, and TokenLayout.gather lays them out again"
)
OTHER_ORDER = "micro-batches in another order than their routes (a shuffle, dynamic batches)"
EXTRA = "an evaluation or a reference pass inside the block, which belongs outside"
LEFT_OUT = "a micro-batch before it was left out, and the block wasn't told by session.skip()"
CALLED_INSIDE = (
    "the block was given a wrapper, and the loop calls the module inside it (model.module, say) or forward() "
    "itself, past the __call__ of what was given; give the block the module that the loop really calls"
)


def shown(value: object, most: int = 80) -> str:
    """Return the repr of a user's value for a message, cut off.

    Of an array it is dtype and shape.

    >>> from npu_replay.errors import shown
    >>> shown(torch.rand(3, 4)), shown([1, 2])
    ('Tensor of torch.float32, [3, 4]', '[1, 2]')
    """
    dtype = getattr(value, "dtype", None)
    shape = getattr(value, "shape", None)
    if dtype is not None and shape:
        return f"{type(value).__name__} of {dtype}, {[*shape]}"[:most]
    return repr(value)[:most]


def printable(text: str) -> str:
    """Return a text in which control characters and lone surrogates are written as escapes.

    >>> from npu_replay.errors import printable
    >>> printable(chr(27) + "[2J all is well")
    '\\\\x1b[2J all is well'
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def quoted(value: object, most: int = 80) -> str:
    """Return what somebody else's data say, for a message: cut off, on one line and printable."""
    return printable(" ".join((value[:most] if isinstance(value, str) else shown(value, most)).split()))


def as_text(value: object) -> str:
    """Return the text of a value for a message, cut off where it is very long."""
    return f"{value}"[:_LONGEST]


def whole_number(
    value: Any,
    what: str,
    where: str = "",
    *,
    least: int | None = None,
    most: int | None = None,
    kind: type[ReplayError] = ReplayError,
) -> int:
    """Return `value` as an int, also from numpy or torch; raise `kind` if it is out of range.

    >>> whole_number(np.int64(7), "top-k", least=1, most=8)
    7
    """
    number = operator.index(value)
    kind.unless(
        (least is None or number >= least) and (most is None or number <= most),
        f"bad {what}",
        expected=f"{least} to {most}",
        got=number,
        where=where,
    )
    return number


def list_of(
    value: Any, item: type[_T], what: str, cause: str = "", *, kind: type[ReplayError] = ReplayError
) -> list[_T]:
    """Return a list with one item a micro-batch; raise `kind` for a single item, no list, or other items.

    >>> list_of((3, 4), int, "sizes")
    [3, 4]
    """
    items = list(value) if isinstance(value, Iterable) else [value]
    wrong = [type(member).__name__ for member in items if not isinstance(member, item)]
    kind.unless(
        not wrong and not isinstance(value, item),
        f"{what} are given as a list",
        f"one {item.__name__} a micro-batch",
        wrong or f"a single {item.__name__}",
        cause,
    )
    return items


def one_of(
    value: Any, words: tuple[str, ...], what: str, where: str = "", kind: type[ReplayError] = ReplayError
) -> None:
    kind.unless(value in words, f"unknown {what}", " or ".join(map(repr, words)), shown(value), where=where)


def micro_batch(number: int, layer: object = None) -> str:
    """Return the place of an error, such as «micro-batch 2, layer 5»."""
    return f"micro-batch {number}" if layer is None else f"micro-batch {number}, layer {layer}"


def described(function: object) -> str:
    """Return a function's full name, such as «megatron.core.transformer.moe.moe_utils.topk_routing»."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or '?'}.{name}"


def share(value: Any, what: str, of: str, *, kind: type[ReplayError] = ReplayError) -> float:
    """Return a share from 0 to 1, given as a number or as text; raise `kind` for others."""
    try:
        number = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = -1.0
    kind.unless(0 <= number <= 1, f"{what} is a share of the {of}", "a number, 0 to 1", shown(value))
    return number
