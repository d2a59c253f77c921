"""releases: one reading of versions, and one answer to whether a row of a table holds."""

from __future__ import annotations

from typing import Any

import pytest

from npu_replay import ReplayError
from npu_replay.rollout.release_rules import Releases, release, tells_release


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.5.12.post1", (0, 5, 12)),
        ("0.23.post1", (0, 23, 0)),
        ("0.24.0rc1", (0, 24, 0)),
        ("0.24rc1", (0, 24, 0)),
        ("0.24b2", (0, 24, 0)),
        ("0.27.1.dev12+g0f3a", (0, 27, 1)),
        ("0.23", (0, 23, 0)),
        ("v0.16.0", (0, 16, 0)),
        ("0.33.0+cu128", (0, 33, 0)),
        ("0.33+cu128", (0, 33, 0)),
        ("1", (1, 0, 0)),
        ("unknown", (0, 0, 0)),
        ("nightly-20260101", (0, 0, 0)),
        ("", (0, 0, 0)),
        ("9" * 5000, (999_999_999, 0, 0)),
    ],
)
def test_releases_are_compared_by_their_first_numbers(version: str, numbers: tuple[int, int, int]) -> None:
    assert release(version) == numbers


@pytest.mark.parametrize("version", [None, 0.33, (0, 33, 0)])
def test_a_release_is_told_as_text(version: Any) -> None:
    with pytest.raises(ReplayError, match="told as text"):
        release(version)


@pytest.mark.parametrize(
    ("version", "numbers", "tells"),
    [
        *(
            (version, 2, True)
            for version in ("0.23", "0.23.0rc1", "v0.16.0", "0.33.0+cu128", "0.22.1.dev5+gab")
        ),
        *(
            (version, 2, False)
            for version in ("", "nightly", "0.1.dev123+g1a2b3c", "0.12.dev1", "0.0.0", "7")
        ),
        *((version, 3, True) for version in ("0.5.23", "0.5.12.post1", "0.5.23.dev3+gabc")),
        *((version, 3, False) for version in ("0.5", "0.5.dev1", "latest", "0.0.0")),
        (None, 2, False),
    ],
)
def test_a_version_tells_its_release_or_not(version: Any, numbers: int, tells: bool) -> None:
    assert tells_release(version, numbers) == tells


@pytest.mark.parametrize(
    ("version", "holds"),
    [
        ("0.20.2.post1", False),
        ("0.21.0rc1", True),
        ("0.21.0", True),
        ("0.21.7+cu128", True),
        ("v0.21.1.dev3", True),
        ("0.22.0rc1", False),
        ("0.22.0", False),
        ("nightly", True),
        ("0.1.dev123+g1a2b3c", True),
        ("", True),
    ],
)
def test_a_row_holds_from_its_first_release_to_before_the_next(version: str, holds: bool) -> None:
    """A version that isn't told may be any; a release candidate is its release."""
    assert Releases(since="0.21.0", until="0.22.0").holds(version) == holds


def test_a_row_of_one_device_holds_there_and_where_nobody_says() -> None:
    row = Releases(device="cpu")
    assert [row.holds("0.21.0", device) for device in ("cpu", "", "npu")] == [True, True, False]
