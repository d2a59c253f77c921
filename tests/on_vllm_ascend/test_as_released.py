"""What vllm-ascend hands out by itself. The rows that it loses are the reason for the plug-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from on_vllm_ascend.cases import REGISTERED
from on_vllm_ascend.conftest import Told, release
from on_vllm_ascend.paths import NEW, RELEASES, SCHEMES, Path, marked, paths


@pytest.mark.parametrize("path", marked(paths(), release()))
def test_rows(path: Path, told: Callable[[bool, str], Told]) -> None:
    expected, found = path.as_released[release()], told(False, path.case.device)[path.case.name]
    if isinstance(expected, str):
        assert any(expected in error for error in found["errors"]), found
    else:
        assert "errors" not in found, found
        assert found["right"] == expected, found
        assert found["right"] + found["zeros"] + found["earlier"] + found["other"] == found["of"]


@pytest.mark.parametrize(
    "path", [one for one in paths() if one.case.name == "unquantized-MC2-tp2-dp1-3_steps"]
)
def test_lost_rows_are_an_earlier_step_s_where_nothing_clears_the_buffer(
    path: Path, told: Callable[[bool, str], Told]
) -> None:
    found: dict[str, Any] = told(False, path.case.device)[path.case.name]
    assert bool(found["earlier"]) == (release() == NEW), found


def test_every_scheme_of_the_release_is_tried(told: Callable[[bool, str], Told]) -> None:
    assert release() in RELEASES
    assert told(False, "A3")[REGISTERED] == sorted(SCHEMES[release()])
