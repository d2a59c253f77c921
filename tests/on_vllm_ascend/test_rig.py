"""What a release of vllm-ascend hands out with the plug-in, and with the plug-in broken.

A release, with its vLLM, is on the path: ci/vllm_ascend.sh puts it there. Of many of the cases each of these
releases by itself loses rows, or ends in an error.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from npu_replay.compat.vllm_ascend import plugin
from npu_replay.compat.vllm_ascend.self_check import STEPS
from on_vllm_ascend.cases import REGISTERED, Case

try:
    RELEASE = version("vllm-ascend")
except PackageNotFoundError:
    RELEASE = ""
OLD = "0.18.0"
MID = "0.23.0"
NEW = "0.30.0rc2"
ALL = (OLD, MID, NEW)
OLDER = (OLD, MID)

SCHEMES = {
    OLD: ("W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A16", "W8A8_MXFP8", "W8A8_MIX"),
    MID: (
        *("W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A16", "W8A8_MXFP8", "W8A8_MIX", "W8A8FP8_DYNAMIC"),
        *("W4A16_MXFP4", "W4A8_MXFP", "W4A4_MXFP4", "FP8/w4a8_moe"),
    ),
    NEW: (
        *("W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A16", "W8A8_MXFP8", "W8A8FP8_DYNAMIC"),
        *("W4A16_MXFP4", "W4A8_MXFP", "W4A4_MXFP4", "fp8", "fp8/ds_w4a8_moe"),
    ),
}
"""Every way to quantize experts that a release registers; a test holds it against the registry."""


@dataclass(frozen=True)
class Listed:
    """A case, the releases that have it, and those of them on which --quick runs it.

    In --quick each part of a case is on each way of npu_replay's through a release: OLD hands rows out in its
    own way and chooses as MID does; what communicates by MC2 or by the fused MC2 is placed alike.
    """

    case: Case
    releases: Collection[str] = ALL
    quick: Collection[str] = (MID, NEW)


def of_release(release: str) -> list[Any]:
    """The cases that a release has, for pytest; what --quick leaves out is slow."""
    return [
        pytest.param(entry.case, id=entry.case.name, marks=() if release in entry.quick else pytest.mark.slow)
        for entry in listed()
        if release in entry.releases
    ]


def listed() -> list[Listed]:
    quantized = Case(scheme="W8A8_DYNAMIC")
    shrinking = ((13,), (5,), (1,))
    unequal = Case(dp=2, steps=((13, 9),))
    return [
        Listed(Case(), quick=ALL),
        Listed(Case(routing="grouped_sigmoid")),
        Listed(replace(quantized, routing="grouped_sigmoid"), quick=()),
        Listed(Case(draft=True), quick=ALL),
        Listed(Case(padding=3), quick=ALL),
        Listed(Case(steps=shrinking), quick=ALL),
        Listed(Case(overlap_gate=True), OLDER),
        Listed(replace(quantized, overlap_gate=True), OLDER, quick=()),
        Listed(Case(overlap_gate=True, tp=2), OLDER, quick=()),
        Listed(replace(quantized, overlap_gate=True, tp=2), OLDER, quick=()),
        Listed(Case(comm="MC2", tp=2, kv_cache_twice=True), (MID, NEW)),
        Listed(Case(device="_310P"), quick=()),
        Listed(replace(quantized, device="_310P"), quick=()),
        # Each rank has a part of the tokens, and the others' are lost.
        Listed(Case(tp=2), quick=ALL),
        *(Listed(Case(comm=comm, tp=2)) for comm in ("MC2", "FUSED_MC2", "ALLTOALL")),
        Listed(replace(quantized, comm="MC2", tp=2)),
        *(Listed(replace(quantized, comm=comm, tp=2), quick=()) for comm in ("FUSED_MC2", "ALLTOALL")),
        Listed(replace(quantized, tp=2), quick=()),
        Listed(Case(comm="MC2", tp=2, steps=shrinking), quick=ALL),
        Listed(Case(comm="FUSED_MC2", tp=2, steps=shrinking), quick=()),
        Listed(Case(comm="MC2", tp=2, padding=3), quick=()),
        Listed(Case(comm="MC2", tp=2, draft=True), quick=()),
        # More ranks than some have tokens: parts of unequal size, and ranks without one.
        *(Listed(Case(comm=comm, tp=4, steps=((13,), (2,), (1,)))) for comm in ("MC2", "ALLTOALL")),
        Listed(Case(tp=2, eplb=True), quick=()),
        Listed(Case(comm="MC2", tp=2, eplb=True)),
        Listed(replace(quantized, comm="MC2", tp=2, eplb=True), quick=()),
        Listed(replace(quantized, tp=2, mix_placement=True), (MID, NEW)),
        Listed(Case(tp=2, sequence_parallel=True), OLDER),
        *(Listed(Case(comm=comm, tp=2, sequence_parallel=True), OLDER) for comm in ("MC2", "ALLTOALL")),
        Listed(Case(comm="FUSED_MC2", tp=2, sequence_parallel=True), OLDER, quick=()),
        # All ranks choose for all tokens, and order experts otherwise: no alarm, in the checked steps or in
        # two more.
        Listed(
            Case(tp=2, broken="the_second_ranks_order_is_another", steps=((3,),) * (STEPS + 2)), quick=ALL
        ),
        # Enough tokens for a rank's part to be held against logits.
        Listed(Case(tp=2, sequence_parallel=True, steps=((17,),)), OLDER, quick=()),
        Listed(Case(comm="MC2", tp=2, sequence_parallel=True, steps=((17,),)), OLDER),
        Listed(replace(quantized, comm="MC2", tp=2, sequence_parallel=True, steps=((17,),)), OLDER, quick=()),
        Listed(Case(comm="MC2", tp=2, dp=2, sequence_parallel=True, steps=((19, 17),)), quick=()),
        # Data parallel ranks with 13 and 9 tokens.
        Listed(unequal),
        Listed(replace(unequal, comm="MC2")),
        *(Listed(replace(unequal, comm=comm), quick=()) for comm in ("FUSED_MC2", "ALLTOALL")),
        Listed(replace(unequal, scheme="W8A8_DYNAMIC"), quick=()),
        Listed(replace(unequal, tp=2)),
        *(Listed(replace(unequal, tp=2, comm=comm)) for comm in ("MC2", "ALLTOALL")),
        Listed(replace(unequal, tp=2, comm="FUSED_MC2"), quick=()),
        Listed(replace(unequal, tp=2, comm="MC2", steps=((13, 9), (1, 1), (2, 7))), quick=ALL),
        Listed(replace(unequal, tp=2, sequence_parallel=True)),
        Listed(replace(unequal, tp=2, comm="MC2", sequence_parallel=True), quick=ALL),
        *(
            Listed(replace(unequal, tp=2, comm=comm, sequence_parallel=True), quick=())
            for comm in ("FUSED_MC2", "ALLTOALL")
        ),
        *(
            Listed(Case(scheme=name), [release for release in ALL if name in SCHEMES[release]])
            for name in sorted({name for of_release in SCHEMES.values() for name in of_release})
        ),
    ]


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
def answer_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
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


def run_rig(cases: list[Case], device: str, folder: Path) -> dict[str, Any]:
    """The answers of one start, by case."""
    asked = folder / "cases"
    asked.write_bytes(pickle.dumps(cases))
    results = folder / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "on_vllm_ascend.rig", str(asked), str(results), device],
        env=os.environ
        | {
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ['PYTHONPATH']}",
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
def test_every_row_is_right_with_the_plug_in(case: Case, answer_of: Told) -> None:
    """By itself a release loses some of most cases."""
    answer = answer_of(case)
    assert "errors" not in answer, answer
    assert answer["right"] == answer["of"] > 0, answer
    assert answer["compared"] == case.compared, answer
    if case.eplb and RELEASE != NEW:  # which looks places up before
        assert answer["moved"] > 0, answer
    if case == Case():
        assert answer[REGISTERED] == sorted(SCHEMES[RELEASE]), "a scheme of this release isn't tried"


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
    case: Case, answer_of: Told
) -> None:
    """A class that npu_replay doesn't know ends it whatever the release is called."""
    answer = answer_of(case)
    assert "right" not in answer, answer
    assert any((BROKEN | CHANGED)[case.broken] in error for error in answer["errors"]), answer


def test_vllms_ray_executor_takes_the_switch_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes along no variable that it isn't told of."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    assert "NPU_REPLAY_VLLM_ASCEND" not in get_env_vars_to_copy()
    plugin._tell_workers_of_ray()
    assert {"NPU_REPLAY_VLLM_ASCEND", "NPU_REPLAY_STRICT"} <= get_env_vars_to_copy()
