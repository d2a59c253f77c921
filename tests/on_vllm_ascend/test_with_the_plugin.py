"""With npu_replay's plug-in each row of each path is right, in its place, on every release."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from on_vllm_ascend.cases import TOP_K, WITH_PLUGIN
from on_vllm_ascend.conftest import Told, release
from on_vllm_ascend.paths import NEW, Path, marked, paths


@pytest.mark.parametrize("path", marked(paths(), release()))
def test_every_row_is_right(path: Path, told: Callable[[str, str], Told]) -> None:
    found = told(WITH_PLUGIN, path.case.device)[path.case.name]
    assert "errors" not in found, found
    assert found["right"] == found["of"] > 0, found
    assert found["decoded"] == found["of"], found
    assert found["compared"] == path.case.compared, found
    if path.case.dp == 1:
        assert found["columns"] == TOP_K + path.case.mix_placement, found
    if path.case.eplb and release() != NEW:  # which looks places up before
        assert found["moved"] > 0, found
