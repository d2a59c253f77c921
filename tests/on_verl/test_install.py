"""verl and npu_replay in either order, unknown releases, patches of somebody else's, and all of it undone.

What comes first is imported once in a process; each case goes on from there in a fork of its own.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

import jobs

pytestmark = [pytest.mark.megatron, pytest.mark.newest]

ALL, NONE, REFUSAL = "all", "none", "apply_router_replay_patch alone"


@dataclass(frozen=True)
class Case:
    """What a process does, and what is so then.

    Attributes:
        first: which of the two is imported before the other.
        ours: which of the names that LOOKED_AT has are npu_replay's.
        words: of the error when an engine is built.
        logged: words of the one ERROR in the log, since verl swallows what a plug-in raises.
        facts: what the process's function has found, besides.
    """

    first: str
    do: str = "nothing"
    env: Mapping[str, str] = field(default_factory=dict)
    ours: str = ALL
    words: Sequence[str] = ()
    logged: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def unknown(do: str, *words: str) -> Case:
    """An unknown verl, or somebody else's in its place: all or nothing, and an engine isn't built."""
    return Case("verl", do, ours=REFUSAL, words=("ReplayError", *words), logged=("[npu_replay]", *words))


RESTORED = {"patched": True, "restored": True, "flag": False}
CASES = {
    "npu_replay first": Case("npu_replay"),
    "installed twice": Case("npu_replay", "install_again", facts={"changed": False}),
    "uninstalled": Case("npu_replay", "uninstall", ours=NONE, facts={"patches": 0}),
    "somebody replaced a name of ours": Case("npu_replay", "replaced_later", facts={"stays": True}),
    "turned off": Case("verl", env={"NPU_REPLAY_DISABLE": "1"}, ours=NONE, facts={"patches": 0}),
    "verl's own patch came first": Case("verl", "patched_by_verl", facts=RESTORED),
    "an unknown argument": unknown("unknown_argument", "router_replay_utils", "novelty", "update npu_replay"),
    "a name is missing": unknown(
        "missing_name", "router_replay_utils", "pp_gather", "another than npu_replay knows"
    ),
    "somebody else's apply": Case("verl", "strangers_apply"),
    # There is nothing to put the refusal in then, and that must not be the error.
    "no apply": Case(
        "verl",
        "no_apply",
        ours=NONE,
        logged=("another than npu_replay knows", "apply_router_replay_patch"),
    ),
    "a name is missing, lenient": Case(
        "verl", "missing_name", {"NPU_REPLAY_STRICT": "0"}, ours=NONE, logged=("pp_gather",)
    ),
    "somebody else's routing": Case(
        "npu_replay",
        "strangers_routing",
        words=("TopKRouter.routing: somebody else's routing", "with RoutingReplay", "stranger"),
    ),
}
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Answer]:
    """What each case has found, of two processes: npu_replay comes first in one, verl in the other."""
    answers: dict[str, Answer] = {}
    for first in ("npu_replay", "verl"):
        cases = {name: (case.do, dict(case.env)) for name, case in CASES.items() if case.first == first}
        # From 0.9 on verl loads an installed npu_replay by itself; the order is the test's here.
        env: dict[str, str | None] = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
        answers |= jobs.run("on_verl.test_install:main", {"first": first, "cases": cases}, env=env)
    return answers


@pytest.mark.parametrize("name", CASES)
def test_in_either_order_all_names_are_ours_or_none_and_an_engine_says_why(
    outcomes: dict[str, Answer], name: str
) -> None:
    """In every module that bound them, too."""
    case = CASES[name]
    answer = outcomes[name]
    ours = {name for name, is_ours in answer["ours"].items() if is_ours}
    apply = {name for name in answer["ours"] if name.endswith(".apply_router_replay_patch")}
    assert ours - apply == (answer["ours"].keys() - apply if case.ours == ALL else set())
    assert bool(ours & apply) == (case.ours != NONE)
    assert all(word in (answer["raised"] or "") for word in case.words), answer["raised"]
    assert case.words or "ReplayError" not in (answer["raised"] or "")
    assert len(answer["logged"]) == bool(case.logged), answer["logged"]
    assert all(word in answer["logged"][0] for word in case.logged)
    assert {fact: answer[fact] for fact in case.facts} == case.facts


# In the processes

PATCH = "verl.utils.megatron.router_replay_patch"
UTILS = "verl.utils.megatron.router_replay_utils"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
LOOKED_AT = {
    PATCH: ("RouterReplay", "apply_router_replay_patch"),
    UTILS: ("RouterReplay", "set_router_replay_data", "merge_router_topk_indices", "RouterReplayHelper"),
    ENGINE: ("RouterReplay", "set_router_replay_data", "apply_router_replay_patch", "pp_gather"),
}


class _Keeps(logging.Handler):
    said: ClassVar[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main(task: dict[str, Any]) -> dict[str, Answer]:
    """Import what is `first`, and then run `cases`: what to do, and with which variables."""
    logging.getLogger("npu_replay").addHandler(_Keeps(logging.ERROR))
    for name in (task["first"], PATCH, UTILS, ENGINE):
        importlib.import_module(name)
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        answers = pool.starmap(_case, task["cases"].values(), chunksize=1)
    return dict(zip(task["cases"], answers, strict=True))


def _case(do: str, env: dict[str, str]) -> Answer:
    os.environ.update(env)
    patch = sys.modules[PATCH]
    utils = sys.modules[UTILS]
    answer: Answer = globals()[f"_{do}"](patch, utils) or {}
    npu_replay = importlib.import_module("npu_replay")
    answer["ours"] = {
        f"{module.rpartition('.')[2]}.{name}": _is_ours(getattr(sys.modules[module], name))
        for module, names in LOOKED_AT.items()
        for name in names
        if hasattr(sys.modules[module], name)  # a case may have deleted it
    }
    try:
        if do not in ("uninstall", "no_apply"):
            patch.apply_router_replay_patch()  # type: ignore[attr-defined]
        answer["raised"] = None
    except Exception as error:
        answer["raised"] = f"{type(error).__name__}: {error}"
    return answer | {"logged": _Keeps.said, "patches": len(npu_replay.report().patches)}


def _is_ours(function: Any) -> bool:
    """Does a function, or a class's answer to what an engine asks, go through npu_replay?"""
    for name in ("set_global_router_replay_action", "is_r2_record_action"):
        function = getattr(function, name, function)
    return bool(
        function.__code__.co_filename.endswith(("compat/verl/functions.py", "compat/patching/patches.py"))
    )


# What is done, after verl or after npu_replay and verl; npu_replay is there when it
# returns. Some return what else is so then


def _nothing(patch: Any, utils: Any) -> None:
    """The two imports are all."""


def _install_again(patch: Any, utils: Any) -> Answer:
    npu_replay: Any = sys.modules["npu_replay"]
    once = npu_replay.report().patches
    npu_replay.install()
    return {"changed": not once or once != npu_replay.report().patches}


def _uninstall(patch: Any, utils: Any) -> None:
    sys.modules["npu_replay"].uninstall()


def _replaced_later(patch: Any, utils: Any) -> Answer:
    """And then another module of verl's is imported."""

    def pp_gather(*args: Any) -> Any:
        raise NotImplementedError

    utils.pp_gather = pp_gather
    importlib.import_module("npu_replay.compat.verl.install")._rebind()
    return {"stays": utils.pp_gather is pp_gather}


def _patched_by_verl(patch: Any, utils: Any) -> Answer:
    """As for external_lib of 0.7's workers: their own patch is applied by then."""
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    pristine = router.routing.__code__
    patch.apply_router_replay_patch()
    patched = router.routing.__code__ is not pristine
    importlib.import_module("npu_replay")
    restored = router.routing.__code__.co_code == pristine.co_code
    return {"patched": patched, "restored": restored, "flag": hasattr(router, "_router_replay_patched")}


def _unknown_argument(patch: Any, utils: Any) -> None:
    native = utils.set_router_replay_data

    def set_router_replay_data(layers: Any, mask: Any, config: Any, novelty: Any = None) -> None:
        return native(layers, mask, config)

    set_router_replay_data.__module__ = utils.__name__
    utils.set_router_replay_data = set_router_replay_data


def _missing_name(patch: Any, utils: Any) -> None:
    del utils.pp_gather


def _no_apply(patch: Any, utils: Any) -> None:
    del patch.apply_router_replay_patch


def _strangers_apply(patch: Any, utils: Any) -> None:
    def stranger(self: Any, logits: Any) -> Any:
        raise NotImplementedError

    patch.apply_router_replay_patch = stranger


def _strangers_routing(patch: Any, utils: Any) -> None:
    router = importlib.import_module("megatron.core.transformer.moe.router")

    def stranger(self: Any, logits: Any) -> Any:
        return RoutingReplay.pop_forward(logits)  # type: ignore[name-defined]  # noqa: F821

    router.TopKRouter.routing = stranger
