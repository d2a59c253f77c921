"""Defines the rows of the engines' tables: the releases of each fault, and the words of its error.

Every row holds for a range of releases, on one device or on all. `Releases.holds` alone decides it, so
«0.24.0rc1», «0.23.0.post1» and «0.33.0+cu128» mean the same to every table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from npu_replay.errors import InvalidRoutes

_NUMBERS = re.compile(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?")
_CAUSES = 5
"""The most causes that an error names."""


def release(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version, for comparing; zeros if it has none («nightly»)."""
    match = _NUMBERS.match(version)
    return tuple(int((number or "0")[:9]) for number in match.groups()) if match else (0, 0, 0)


def tells_release(version: object, numbers: int = 2) -> bool:
    """Return whether a version names its release by so many numbers."""
    if not isinstance(version, str) or not any(release(version)):
        return False
    # «0.33.0+cu128» does. «0.1.dev123+g1a2b3c», a build from a clone without tags, doesn't.
    return re.match(rf"v?\d+\.\d+(?!\d*\.dev)(?:\.\d+){{{numbers - 2}}}", version) is not None


@dataclass(frozen=True, kw_only=True)
class Releases:
    """Describes a range of releases, from `since` to before `until`, on `device` or, if empty, on all."""

    since: str = ""
    until: str = ""
    device: str = ""

    def holds(self, version: str, device: str = "") -> bool:
        """Return whether a release is in the range; an unknown release or device may be any."""
        if self.device and device and device != self.device:
            return False
        if not tells_release(version):
            return True
        at = release(version)
        return (not self.since or at >= release(self.since)) and (not self.until or at < release(self.until))


class Symptom(str, Enum):
    """Names how an engine's routes are wrong."""

    MISSING = "missing"
    TOKENS = "other tokens"
    UNREADABLE = "unreadable"
    SHAPE = "shape"
    COLUMNS = "columns"
    TOPK = "topk"
    TOO_FEW_ROWS = "too few rows"
    TOO_MANY_ROWS = "too many rows"
    RANGE = "range"
    ZEROS = "zeros"
    ZERO_ROWS = "zero rows"
    CONSTANT_LAYER = "constant layer"
    DUPLICATES = "duplicates"
    DENSE_COLUMN = "dense column"
    STALE_ROWS = "stale rows"


@dataclass(frozen=True)
class Fault(Releases):
    """Describes a known fault of an engine.

    Attributes:
        symptom: how it shows; None: in any way.
        cause: for the user: what it is and what to do.
        only: the ways of an answer that have it («http», «stop string»); empty: any.
        always: what these releases do however they are started («gives zeros»); or empty.
        instead: the releases to use instead of those.
    """

    symptom: Symptom | None
    cause: str
    only: tuple[str, ...] = ()
    always: str = ""
    instead: str = ""


def older(oldest: str, instead: str) -> Fault:
    """Make the row that refuses all releases before the oldest that is checked."""
    return Fault(
        None,
        until=oldest,
        always=f"is older than {oldest}, the oldest release that npu_replay is checked with",
        instead=instead,
        cause="a release that nobody checks: it may have no routes, or zeros, or those of other tokens",
    )


EnginePlan: TypeAlias = "Mapping[str, Any]"
"""The arguments that an engine is to be started with, by their Python names."""


@dataclass(frozen=True)
class Clash(Releases):
    """Describes a plan under which releases return no routes, or wrong ones.

    Attributes:
        arguments: those that are read in the plan, and named in an error.
        instead, why: what to plan instead, or which release to use; and what happens otherwise.
        problem: replaces «gives no routes, or wrong ones, with this argument». It may hold «{argument}».
        got: replaces the arguments' values.
        mended: the row doesn't apply where npu_replay captures in the engine's place.
    """

    arguments: tuple[str, ...]
    when: Callable[[EnginePlan, tuple[str, ...]], bool]
    instead: str
    why: str
    problem: str = ""
    got: str = ""
    mended: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """Describes whose data it is, for messages; `version` and `device` may be unknown.

    `sample` is «request 17, completion 2», `field` «choices[0].routed_experts». `faults` are the engine's
    known ones, the likeliest first, and `ways` how the answer came, for `Fault.only`.
    """

    engine: str
    version: str = ""
    device: str = ""
    sample: str = ""
    field: str = ""
    faults: tuple[Fault, ...] = ()
    ways: tuple[str, ...] = ()

    def error(
        self, symptom: Symptom, problem: str, expected: object = None, got: object = None, *, where: str = ""
    ) -> InvalidRoutes:
        """Make an error about this data, with the likeliest cause."""
        # For an unknown device, name the cause on each; for an unknown release, the first few of all.
        has_release = tells_release(self.version)
        causes: dict[str, str] = {}
        for fault in self.faults:
            fits = fault.symptom is symptom or (fault.symptom is None and has_release)
            came = not fault.only or set(fault.only) & {*self.ways}
            if fits and came and fault.holds(self.version, self.device):
                if fault.symptom is None:
                    causes = {"": fault.cause}
                    break
                one_of = ("" if self.device else fault.device) if has_release else fault.cause
                causes.setdefault(one_of, fault.cause)
        parts = (f"{self.engine} {self.version}".rstrip(), self.sample, self.field, where)
        return InvalidRoutes(
            problem,
            where=", ".join(part for part in parts if part),
            expected=expected,
            got=got,
            cause="; or ".join([*dict.fromkeys(causes.values())][:_CAUSES]),
        )

    def unreadable(self, problem: str, expected: object, got: object) -> InvalidRoutes:
        """Make an error about data of the wrong kind."""
        return self.error(Symptom.UNREADABLE, problem, expected, got)
