"""What vllm-ascend hands out by itself. The rows that it loses are the reason for the plug-in.

Nothing that changes here changes it: of these cases all but a few run before a release alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from on_vllm_ascend.cases import AS_RELEASED, REGISTERED, Case
from on_vllm_ascend.conftest import Told, release
from on_vllm_ascend.paths import NEW, RELEASES, SCHEMES, Path, marked, paths

FEW = {
    "unquantized-ALLGATHER-tp1-dp1",
    "unquantized-ALLGATHER-tp1-dp1-draft",
    "unquantized-ALLGATHER-tp1-dp2",
    "unquantized-MC2-tp2-dp1-3_steps",
    "W8A8_DYNAMIC-ALLGATHER-tp1-dp1",
}


@pytest.mark.parametrize("path", marked(paths(), release(), FEW))
def test_rows(path: Path, told: Callable[[str, str], Told]) -> None:
    expected, found = path.as_released[release()], told(AS_RELEASED, path.case.device)[path.case.name]
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
    path: Path, told: Callable[[str, str], Told]
) -> None:
    found: dict[str, Any] = told(AS_RELEASED, path.case.device)[path.case.name]
    assert bool(found["earlier"]) == (release() == NEW), found


@pytest.mark.parametrize("path", [Path(Case(), {})], ids=[""])
def test_every_scheme_of_the_release_is_tried(path: Path, told: Callable[[str, str], Told]) -> None:
    assert release() in RELEASES
    assert told(AS_RELEASED, path.case.device)[REGISTERED] == sorted(SCHEMES[release()])
