"""What a release of vllm-ascend hands out with the plug-in, and with the plug-in broken.

A release, with its vLLM, is on the path: ci/vllm_ascend.sh puts it there.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path as File
from typing import Any

import pytest

from npu_replay.compat.vllm_ascend import plugin
from on_vllm_ascend.cases import REGISTERED, Case
from on_vllm_ascend.paths import NEW, OLD, SCHEMES, of_release

try:
    RELEASE = version("vllm-ascend")
except PackageNotFoundError:
    RELEASE = ""
LIMIT = 1500
"""Seconds for all cases of a start."""
pytestmark = [
    pytest.mark.vllm_ascend,
    pytest.mark.timeout(2 * LIMIT),
    pytest.mark.skipif(not RELEASE, reason="no vllm-ascend on PYTHONPATH: ci/vllm_ascend.sh fetches it"),
]
Told = Callable[[Case], dict[str, Any]]
BROKEN = {
    "ranks_in_the_wrong_order": "the router's logits",
    "each_ranks_part_taken_for_the_whole": "were written by no rank",
    "nothing_put_together": "weren't put together",
    "rows_of_earlier_steps": "written by more than one rank",
    # From 0.27 on a layer's own router says which one it is.
    **({} if RELEASE >= "0.27" else {"a_layer_that_never_ends": "were chosen twice"}),
}
SPLIT = Case(comm="MC2", tp=2, steps=((13,), (5,)))
CHANGED = {
    "a_context_without_the_way": "_EXTRA_CTX.moe_comm_type",
    "a_capturer_that_hands_rows_out_otherwise": "one of save_captured_experts",
    "layers_that_choose_otherwise": "_select_experts(" if RELEASE >= "0.27" else "select_experts(",
}


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the rig told of a case: one start for each kind of device."""
    wanted: dict[str, dict[str, Case]] = {}
    for item in request.session.items:
        case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        if isinstance(case, Case):
            wanted.setdefault(case.device, {})[case.name] = case
    answers: dict[str, dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        if case.device not in answers:
            cases = sorted(wanted[case.device].values(), key=lambda case: case.name)
            answers[case.device] = run_rig(cases, case.device, tmp_path_factory.mktemp("rig"))
        if case.name not in answers[case.device]:  # and it isn't started again for each
            pytest.fail(f"the rig ended before {case.name}:\n{answers[case.device]['output']}")
        return {REGISTERED: answers[case.device][REGISTERED], **answers[case.device][case.name]}

    return of


def run_rig(cases: list[Case], device: str, folder: File) -> dict[str, Any]:
    """The answers of one start, by case."""
    asked = folder / "cases"
    asked.write_bytes(pickle.dumps(cases))
    results = folder / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "on_vllm_ascend.rig", str(asked), str(results), device],
        env=os.environ
        | {
            "PYTHONPATH": f"{File(__file__).parents[1]}:{os.environ['PYTHONPATH']}",
            "VLLM_VERSION": version("vllm"),  # unpacked, vLLM calls itself a dev build
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT,
    )
    print(done.stdout)
    return {"output": done.stdout[-4000:], **(json.loads(results.read_text()) if results.exists() else {})}


@pytest.mark.parametrize("case", of_release(RELEASE))
def test_every_row_is_right_with_the_plug_in(case: Case, told: Told) -> None:
    """By itself a release loses some of most cases."""
    found = told(case)
    assert "errors" not in found, found
    assert found["right"] == found["of"] > 0, found
    assert found["compared"] == case.compared, found
    if case.eplb and RELEASE != NEW:  # which looks places up before
        assert found["moved"] > 0, found
    if case == Case():
        assert found[REGISTERED] == sorted(SCHEMES[RELEASE]), "a scheme of this release isn't tried"


def broken(name: str, *, quick: bool = True, **changes: Any) -> Any:
    marks = () if quick else pytest.mark.slow
    return pytest.param(replace(SPLIT, broken=name, **changes), id=name, marks=marks)


@pytest.mark.parametrize(
    "case",
    [
        *(broken(name, quick=RELEASE != OLD, draft="never_ends" in name) for name in BROKEN),
        *(broken(name) for name in CHANGED),
    ],
)
def test_a_broken_plug_in_is_found_in_the_first_steps_and_another_class_at_the_start(
    case: Case, told: Told
) -> None:
    """A class that npu_replay doesn't know ends it whatever the release is called."""
    found = told(case)
    assert "right" not in found, found
    assert any((BROKEN | CHANGED)[case.broken] in error for error in found["errors"]), found


@pytest.mark.parametrize(
    "case", [broken("the_second_ranks_order_is_another", comm="ALLGATHER", steps=((3,),) * 18)]
)
def test_ranks_that_order_experts_otherwise_are_no_alarm(case: Case, told: Told) -> None:
    """All ranks choose for all tokens, in the steps that are checked and in two more."""
    found = told(case)
    assert "errors" not in found, found
    assert found["right"] == found["of"] == 18 * 3


def test_vllms_ray_executor_takes_the_switch_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes along no variable that it isn't told of."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    assert "NPU_REPLAY_VLLM_ASCEND" not in get_env_vars_to_copy()
    plugin._tell_workers_of_ray()
    assert {"NPU_REPLAY_VLLM_ASCEND", "NPU_REPLAY_STRICT"} <= get_env_vars_to_copy()
