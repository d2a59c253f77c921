"""Releases of an engine: which one a version tells, and of which ones a row of a table holds.

Every table of engines asks here, so that «0.24.0rc1», «0.23.0.post1» and «0.33.0+cu128» are the same release
to each of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from npu_replay.errors import ReplayError

_NUMBERS = re.compile(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?")


def release(version: str) -> tuple[int, ...]:
    """«0.5.12.post1» as (0, 5, 12), «0.24.0rc1» as (0, 24, 0): for comparing; zeros where nothing is said.

    Raises:
        ReplayError: it is no text.
    """
    if not isinstance(version, str):
        raise ReplayError(
            "a release is told as text", where="version", expected="«0.23.0»", got=repr(version)
        )
    found = _NUMBERS.match(version)
    return tuple(int((number or "0")[:9]) for number in found.groups()) if found else (0, 0, 0)


def tells_release(version: object, numbers: int = 2) -> bool:
    """Does it say which release this is, by so many numbers? «nightly» doesn't, nor does what a build from a
    clone without tags calls itself, «0.1.dev123+g1a2b3c» or «0.0.0»."""
    if not isinstance(version, str) or not any(release(version)):
        return False
    return re.match(rf"v?\d+\.\d+(?!\d*\.dev)(?:\.\d+){{{numbers - 2}}}", version) is not None


@dataclass(frozen=True, kw_only=True)
class Releases:
    """A run of releases, on one device or on all.

    Attributes:
        since: the first; empty: from the beginning.
        until: the first after the last; empty: none that is known.
        device: «cuda», «npu», «cpu»; empty: any.
    """

    since: str = ""
    until: str = ""
    device: str = ""

    def holds(self, version: str, device: str = "") -> bool:
        """Is that release one of them? One that isn't told may be any, and so may a device."""
        if self.device and device and device != self.device:
            return False
        if not tells_release(version):
            return True
        at = release(version)
        return (not self.since or at >= release(self.since)) and (not self.until or at < release(self.until))
