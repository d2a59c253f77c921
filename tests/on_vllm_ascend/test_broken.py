"""The plug-in broken in twelve ways: the check of its first steps finds each, and the engine stops."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from on_vllm_ascend.cases import WITH_PLUGIN, Case
from on_vllm_ascend.conftest import Told, release
from on_vllm_ascend.paths import Path, marked

CHOSEN, UNWRITTEN = "the router's logits", "were written by no rank"
BROKEN = {
    "a_layer_left_out": UNWRITTEN,
    "ranks_in_the_wrong_order": CHOSEN,
    "each_ranks_part_taken_for_the_whole": UNWRITTEN,
    "rows_one_too_far": UNWRITTEN,
    "physical_ids": CHOSEN,
    "two_layers_swapped": "layers chose in the order",
    "one_column_for_all": "have one expert twice",
    "nothing_put_together": "weren't put together",
    "summed_instead": "in step 1",
    "rows_of_earlier_steps": "written by more than one rank",
    "slots_off_by_one": "slots of step 1",
    "a_layer_that_never_ends": "were chosen twice",
}
TO_0_26 = {"a_layer_left_out", "a_layer_that_never_ends"}
"""Later a layer's own router says which one it is."""


def paths() -> list[Path]:
    split = {"comm": "MC2", "tp": 2, "steps": ((13,), (5,))}
    return [
        Path(Case(**split, broken=name, draft=name == "a_layer_that_never_ends"), {release(): says})
        for name, says in BROKEN.items()
        if not (name in TO_0_26 and release() >= "0.27")
    ]


@pytest.mark.parametrize("path", marked(paths(), release()))
def test_the_self_check_finds_it(path: Path, told: Callable[[str, str], Told]) -> None:
    found = told(WITH_PLUGIN, path.case.device)[path.case.name]
    assert "right" not in found or found["right"] == 0, found
    assert any(str(path.as_released[release()]) in error for error in found["errors"]), found


STALE = Case(comm="MC2", tp=2, steps=((13,), (5,)), broken="rows_of_earlier_steps_after_the_check")


@pytest.mark.parametrize("path", [Path(STALE, {release(): 0})], ids=[STALE.name])
def test_without_the_clear_rows_are_mixed_with_an_earlier_step_s(
    path: Path, told: Callable[[str, str], Told]
) -> None:
    """Nobody looks any more once the first steps are checked: the clear alone keeps them apart."""
    found = told(WITH_PLUGIN, path.case.device)[path.case.name]
    assert "errors" not in found, found
    assert found["earlier"] + found["other"] > 0, found
    assert found["zeros"] == 0, found


ORDER = Case(tp=2, steps=((3,),) * 18, broken="the_second_ranks_order_is_another")
"""All ranks choose for all tokens, in the steps that are checked and in two more."""


@pytest.mark.parametrize("path", [Path(ORDER, {release(): 0})], ids=[ORDER.name])
def test_ranks_that_order_experts_otherwise_are_no_alarm(
    path: Path, told: Callable[[str, str], Told]
) -> None:
    found = told(WITH_PLUGIN, path.case.device)[path.case.name]
    assert "errors" not in found, found
    assert found["right"] == found["of"] == 18 * 3 * 3
