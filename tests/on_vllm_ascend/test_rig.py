"""What a release of vllm-ascend hands out by itself, with the plug-in, and with the plug-in broken.

A release, with its vLLM, is on the path: ci/vllm_ascend.sh puts it there. What it does by itself changes with
nothing here: of these cases all but a few run before a release alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path as File
from typing import Any

import pytest

from npu_replay.compat.vllm_ascend import plugin
from on_vllm_ascend.cases import AS_RELEASED, REGISTERED, TOP_K, WITH_PLUGIN, Case
from on_vllm_ascend.paths import NEW, RELEASES, SCHEMES, Path, marked, paths

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
Told = Callable[[str, Case], dict[str, Any]]
PLAIN = Case()
STEPS = Case(comm="MC2", tp=2, steps=((13,), (5,), (1,)))
UNEQUAL = Case(dp=2, steps=((13, 9),))
FEW = {case.name for case in (PLAIN, STEPS, UNEQUAL, Case(draft=True), Case(scheme="W8A8_DYNAMIC"))}
CHOSEN = "the router's logits"
UNWRITTEN = "were written by no rank"
BROKEN = {
    "ranks_in_the_wrong_order": CHOSEN,
    "each_ranks_part_taken_for_the_whole": UNWRITTEN,
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
CALLED = {
    "0.18.0": [("0.18.1.dev45+g1234567", "0.18.0")],
    "0.23.0": [
        *(("0.23.0.post1.dev3+g1234567", "0.23.0"), ("0.23.1.dev0", "0.23.0+empty")),
        ("0.1.dev1+g1234567", "0.1.dev1+g7654321.empty"),
    ],
    "0.30.0rc2": [
        *(("0.30.0", "0.30.0"), ("0.30.0.post1", "0.30.0"), ("0.30.1.dev0+g1234567", "0.30.0")),
        ("0.32.0rc1", "0.32.0"),
    ],
}
"""What the code of a release may call itself: of vllm-ascend and of vLLM."""


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Told:
    """What the rig told of a case, AS_RELEASED or WITH_PLUGIN: one start for each kind of device."""
    wanted: dict[str, dict[str, dict[str, Any]]] = {}
    for item in request.session.items:
        path = getattr(getattr(item, "callspec", None), "params", {}).get("path")
        if isinstance(path, Path):
            kind = AS_RELEASED if "by_itself" in item.name else WITH_PLUGIN
            wanted.setdefault(path.case.device, {}).setdefault(kind, {})[path.case.name] = path.case.as_json()
    found: dict[str, dict[str, dict[str, Any]]] = {}

    def of(kind: str, case: Case) -> dict[str, Any]:
        if case.device not in found:
            cases = {one: [by[name] for name in sorted(by)] for one, by in wanted[case.device].items()}
            found[case.device] = run_rig(cases, case.device, request.getfixturevalue("tmp_path_factory"))
        told = found[case.device][kind]
        if case.name not in told:  # and it isn't started again for each
            pytest.fail(f"the rig ended before {case.name}:\n{told['said']}")
        return {REGISTERED: told[REGISTERED], **told[case.name]}

    return of


def run_rig(cases: dict[str, Any], device: str, folders: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The answers of one start, by kind and by case."""
    folder = folders.mktemp("rig")
    asked = folder / "cases.json"
    asked.write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "on_vllm_ascend.rig", str(asked), str(folder), "--device", device],
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
    files = {kind: folder / kind for kind in cases}
    told = {kind: json.loads(file.read_text()) for kind, file in files.items() if file.exists()}
    return {kind: {"said": done.stdout[-4000:], **told.get(kind, {})} for kind in cases}


@pytest.mark.parametrize("path", marked(paths(), RELEASE, FEW))
def test_rows_that_a_release_hands_out_by_itself(path: Path, told: Told) -> None:
    """The rows that it loses are the reason for the plug-in."""
    expected = path.as_released[RELEASE]
    found = told(AS_RELEASED, path.case)
    if isinstance(expected, str):
        assert any(expected in error for error in found["errors"]), found
        return
    assert "errors" not in found, found
    assert found["right"] == expected, found
    assert found["right"] + found["zeros"] + found["earlier"] + found["other"] == found["of"]
    if path.case == STEPS:  # lost rows are an earlier step's where nothing clears the buffer
        assert bool(found["earlier"]) == (RELEASE == NEW), found
    if path.case == PLAIN:
        assert RELEASE in RELEASES
        assert found[REGISTERED] == sorted(SCHEMES[RELEASE]), "a scheme of this release isn't tried"


@pytest.mark.parametrize("path", marked(paths(), RELEASE))
def test_every_row_is_right_with_the_plug_in(path: Path, told: Told) -> None:
    found = told(WITH_PLUGIN, path.case)
    assert "errors" not in found, found
    assert found["right"] == found["of"] > 0, found
    assert found["decoded"] == found["of"], found
    assert found["compared"] == path.case.compared, found
    if path.case.dp == 1:
        assert found["columns"] == TOP_K + path.case.mix_placement, found
    if path.case.eplb and RELEASE != NEW:  # which looks places up before
        assert found["moved"] > 0, found


def broken(name: str, **changes: Any) -> Any:
    case = Case(**{**vars(SPLIT), **changes, "broken": name})
    return pytest.param(Path(case, {}), id=name)


@pytest.mark.parametrize("path", [broken(name, draft="never_ends" in name) for name in BROKEN])
def test_the_check_of_the_first_steps_finds_a_broken_plug_in(path: Path, told: Told) -> None:
    found = told(WITH_PLUGIN, path.case)
    assert "right" not in found or found["right"] == 0, found
    assert any(BROKEN[path.case.broken] in error for error in found["errors"]), found


@pytest.mark.parametrize("path", [broken(name) for name in CHANGED])
def test_a_class_that_is_another_than_npu_replay_knows_ends_the_start(path: Path, told: Told) -> None:
    """Whatever the release is called: here it has the name of one that is captured."""
    found = told(WITH_PLUGIN, path.case)
    assert "right" not in found, found
    words = f"this vllm-ascend {RELEASE} is another than npu_replay knows"
    assert all(words in error and CHANGED[path.case.broken] in error for error in found["errors"]), found


@pytest.mark.parametrize(
    "path", [pytest.param(Path(Case(called=said), {}), id=said[0]) for said in CALLED.get(RELEASE, ())]
)
def test_the_same_classes_under_another_name_are_captured(path: Path, told: Told) -> None:
    """A final release, or a build of its branch."""
    found = told(WITH_PLUGIN, path.case)
    assert "errors" not in found, found
    assert found["right"] == found["of"] == 39, found


@pytest.mark.parametrize("path", [broken("rows_of_earlier_steps_after_the_check")])
def test_without_the_clear_rows_are_mixed_with_an_earlier_step_s(path: Path, told: Told) -> None:
    """Nobody looks any more once the first steps are checked: the clear alone keeps them apart."""
    found = told(WITH_PLUGIN, path.case)
    assert "errors" not in found, found
    assert found["earlier"] + found["other"] > 0, found
    assert found["zeros"] == 0, found


@pytest.mark.parametrize(
    "path", [broken("the_second_ranks_order_is_another", comm="ALLGATHER", steps=((3,),) * 18)]
)
def test_ranks_that_order_experts_otherwise_are_no_alarm(path: Path, told: Told) -> None:
    """All ranks choose for all tokens, in the steps that are checked and in two more."""
    found = told(WITH_PLUGIN, path.case)
    assert "errors" not in found, found
    assert found["right"] == found["of"] == 18 * 3 * 3


def test_vllms_ray_executor_takes_the_switch_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes along no variable that it isn't told of."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    assert "NPU_REPLAY_VLLM_ASCEND" not in get_env_vars_to_copy()
    plugin._tell_workers_of_ray()
    assert {"NPU_REPLAY_VLLM_ASCEND", "NPU_REPLAY_STRICT"} <= get_env_vars_to_copy()
