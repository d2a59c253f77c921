"""With npu_replay's plug-in each row of each path is right, in its place, on every release."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from on_vllm_ascend.conftest import Told, release
from on_vllm_ascend.paths import Path, marked, paths


@pytest.mark.parametrize("path", marked(paths(), release()))
def test_every_row_is_right(path: Path, told: Callable[[bool, str], Told]) -> None:
    found = told(True, path.case.device)[path.case.name]
    assert "errors" not in found, found
    assert found["right"] == found["of"] > 0, found
