"""verl and npu_replay in either order, unknown releases, patches of somebody else's, and all of it undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import jobs

pytestmark = [pytest.mark.megatron, pytest.mark.newest]

AFTER_US = {case: (case, {}) for case in ("nothing", "install_again", "uninstall", "strangers_routing")}
AFTER_VERL: dict[str, tuple[str, dict[str, str]]] = {
    case: (case, {})
    for case in ("patched_by_verl", "unknown_argument", "missing_name", "no_apply", "dispatcher")
} | {
    "strangers_apply": ("strangers_apply", {}),
    "unknown_argument, lenient": ("unknown_argument", {"NPU_REPLAY_STRICT": "0"}),
    "missing_name, lenient": ("missing_name", {"NPU_REPLAY_STRICT": "0"}),
    "disabled": ("nothing", {"NPU_REPLAY_DISABLE": "1"}),
}
Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each case has found, of two processes: npu_replay comes first in one, verl in the other."""
    answers: dict[str, dict[str, Any]] = {}

    def of(case: str) -> dict[str, Any]:
        if case not in answers:
            first, cases = ("npu_replay", AFTER_US) if case in AFTER_US else ("verl", AFTER_VERL)
            # From 0.9 on verl loads an installed npu_replay by itself; the order is the test's here.
            env = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
            task = {"first": first, "cases": cases}
            answers.update(jobs.run("on_verl.install_worker:main", task, env=env))
        return answers[case]

    return of


@pytest.mark.parametrize("case", ["nothing", "patched_by_verl", "install_again"])
def test_everything_is_ours_in_every_module_that_bound_it(found: Found, case: str) -> None:
    answer = found(case)
    assert answer["ours"]
    assert all(answer["ours"].values()), answer["ours"]
    assert answer["raised"] is None
    assert answer["logged"] == []


def test_verls_own_patch_that_came_first_is_taken_back(found: Found) -> None:
    answer = found("patched_by_verl")
    assert answer["patched"]
    assert answer["restored"], "Megatron's routing is back"
    assert not answer["flag"]


def test_installing_twice_changes_nothing(found: Found) -> None:
    answer = found("install_again")
    assert answer["once"]
    assert answer["again"] == answer["once"]


def test_no_warning_says_that_an_npu_has_no_replay(found: Found) -> None:
    assert found("nothing")["warned"] == []


@pytest.mark.parametrize("case", ["uninstall", "disabled"])
def test_all_of_it_is_verls_own_again_or_still(found: Found, case: str) -> None:
    """Also in modules that bound our names by from ... import."""
    answer = found(case)
    assert answer["ours"]
    assert not any(answer["ours"].values()), answer["ours"]
    assert answer["patches"] == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown_argument", ("router_replay_utils", "novelty", "update npu_replay")),
        ("missing_name", ("router_replay_utils", "pp_gather", "another than npu_replay knows")),
        (
            "strangers_apply",
            ("somebody else has replaced apply_router_replay_patch", "stranger", "remove it"),
        ),
    ],
)
def test_an_unknown_verl_is_an_error_at_import_and_stops_the_engine(
    found: Found, case: str, words: tuple[str, ...]
) -> None:
    """verl swallows what a plug-in raises, so it is logged; the engine's build then raises it."""
    answer = found(case)
    (logged,) = answer["logged"]
    for word in ("[npu_replay]", *words):
        assert word in logged
    for word in ("ReplayError", *words):
        assert word in answer["raised"], answer["raised"]
    kept = {name for name, is_ours in answer["ours"].items() if is_ours}
    assert all(name.endswith(".apply_router_replay_patch") for name in kept), "all or nothing"


def test_a_verl_without_apply_router_replay_patch_is_told_as_an_unknown_one(found: Found) -> None:
    """There is nothing to put the refusal in then, and that must not be the error."""
    answer = found("no_apply")
    (logged,) = answer["logged"]
    for word in ("another than npu_replay knows", "apply_router_replay_patch"):
        assert word in logged
    assert not any(answer["ours"].values()), answer["ours"]


def test_a_dispatchers_wrapper_that_kept_nothing_gives_way_to_megatrons_own(found: Found) -> None:
    assert found("dispatcher")["restored"]


@pytest.mark.parametrize("case", ["unknown_argument, lenient", "missing_name, lenient"])
def test_without_strictness_the_job_runs_as_if_npu_replay_were_not_there(found: Found, case: str) -> None:
    answer = found(case)
    assert len(answer["logged"]) == 1
    assert not any(answer["ours"].values()), answer["ours"]
    assert "novelty" not in (answer["raised"] or "")


def test_somebody_elses_routing_is_refused_by_name(found: Found) -> None:
    answer = found("strangers_routing")
    assert "TopKRouter.routing: somebody else's routing" in answer["raised"]
    assert "stranger" in answer["raised"]
