"""verl and npu_replay in either order, unknown releases, patches of somebody else's, and all of it undone."""

from __future__ import annotations

from typing import Any

import pytest

import jobs

pytestmark = pytest.mark.megatron

NO_PLUGIN = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
"""From 0.9 on verl loads an installed npu_replay by itself; the order is the test's here."""


def found(case: str, **env: str) -> dict[str, Any]:
    answer: dict[str, Any] = jobs.run(
        "on_verl.install_worker:main", {"case": case}, fresh=True, env=NO_PLUGIN | env
    )
    return answer


@pytest.mark.parametrize("case", ["first", "last"])
def test_everything_is_ours_in_every_module_that_bound_it(case: str) -> None:
    answer = found(case)
    assert answer["ours"]
    assert all(answer["ours"].values()), answer["ours"]
    assert answer["raised"] is None
    assert answer["logged"] == []
    if case == "last":
        assert answer["patched"], "verl's own patch came first"
        assert answer["restored"], "Megatron's routing is back"
        assert not answer["flag"]


def test_installing_twice_changes_nothing() -> None:
    answer = found("twice")
    assert answer["once"]
    assert answer["again"] == answer["once"]
    assert all(answer["ours"].values()), answer["ours"]
    assert answer["raised"] is None
    assert answer["logged"] == []


def test_uninstall_gives_all_of_it_back() -> None:
    """Also in modules that bound our names by from ... import."""
    answer = found("uninstalled")
    assert answer["ours"]
    assert not any(answer["ours"].values()), answer["ours"]
    assert answer["patches"] == 0


def test_disabled_leaves_verl_as_it_is() -> None:
    answer = found("first", NPU_REPLAY_DISABLE="1")
    assert answer["ours"]
    assert not any(answer["ours"].values())
    assert answer["patches"] == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown argument", ("router_replay_utils", "novelty", "update npu_replay")),
        ("missing name", ("router_replay_utils", "pp_gather", "no such name")),
        (
            "somebody else's",
            ("somebody else has replaced apply_router_replay_patch", "stranger", "remove it"),
        ),
    ],
)
def test_an_unknown_verl_is_an_error_at_import_and_stops_the_engine(
    case: str, words: tuple[str, ...]
) -> None:
    """verl swallows what a plug-in raises, so it is logged; the engine's build then raises it."""
    answer = found(case)
    assert len(answer["logged"]) == 1
    for word in ("[npu_replay]", *words):
        assert word in answer["logged"][0], answer["logged"]
    for word in ("ReplayError", *words):
        assert word in answer["raised"], answer["raised"]
    kept = {name for name, is_ours in answer["ours"].items() if is_ours}
    assert kept <= {"router_replay_patch.apply_router_replay_patch"}, "all or nothing"


def test_a_verl_without_apply_router_replay_patch_is_told_as_an_unknown_one() -> None:
    """There is nothing to put the refusal in then, and that must not be the error."""
    answer = found("no apply")
    assert len(answer["logged"]) == 1
    for word in ("another than npu_replay knows", "apply_router_replay_patch", "no such name"):
        assert word in answer["logged"][0], answer["logged"]
    assert not any(answer["ours"].values()), answer["ours"]


def test_a_dispatchers_wrapper_that_kept_nothing_gives_way_to_megatrons_own() -> None:
    assert found("a dispatcher's wrapper that kept nothing")["restored"]


@pytest.mark.parametrize("case", ["unknown argument", "missing name"])
def test_without_strictness_the_job_runs_as_if_npu_replay_were_not_there(case: str) -> None:
    answer = found(case, NPU_REPLAY_STRICT="0")
    assert len(answer["logged"]) == 1
    assert not any(answer["ours"].values()), answer["ours"]
    assert "novelty" not in (answer["raised"] or "")


def test_somebody_elses_routing_is_refused_by_name() -> None:
    answer = found("somebody else's routing")
    assert "TopKRouter.routing: somebody else's routing" in answer["raised"]
    assert "stranger" in answer["raised"]
