"""verl and npu_replay in either order, unknown releases, patches of somebody else's, and all of it undone.

What comes first is imported once in a process; each case goes on from there in a fork of its own.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import warnings
from typing import Any, ClassVar

import pytest

import jobs
import transformers_4

pytestmark = [pytest.mark.megatron, pytest.mark.newest]

AFTER_US = {
    case: (case, {})
    for case in ("nothing", "install_again", "uninstall", "strangers_routing", "adaptors_routing")
}
LENIENT = {"NPU_REPLAY_STRICT": "0"}
AFTER_VERL: dict[str, tuple[str, dict[str, str]]] = {
    "patched_by_verl": ("patched_by_verl", {}),
    "unknown_argument": ("unknown_argument", {}),
    "missing_name": ("missing_name", {}),
    "no_apply": ("no_apply", {}),
    "dispatcher": ("dispatcher", {}),
    "strangers_apply": ("strangers_apply", {}),
    "missing_name, lenient": ("missing_name", LENIENT),
    "disabled": ("nothing", {"NPU_REPLAY_DISABLE": "1"}),
}
Answer = dict[str, Any]
Found = dict[str, Answer]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each case has found, of two processes: npu_replay comes first in one, verl in the other."""
    answers: dict[str, dict[str, Any]] = {}
    for first, cases in (("npu_replay", AFTER_US), ("verl", AFTER_VERL)):
        # From 0.9 on verl loads an installed npu_replay by itself; the order is the test's here.
        env: dict[str, str | None] = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
        answers |= jobs.run("on_verl.test_install:main", {"first": first, "cases": cases}, env=env)
    return answers


@pytest.mark.parametrize("case", ["nothing", "patched_by_verl", "install_again"])
def test_everything_is_ours_in_every_module_that_bound_it(found: Found, case: str) -> None:
    answer = found[case]
    assert answer["ours"]
    assert all(answer["ours"].values()), answer["ours"]
    assert answer["raised"] is None
    assert answer["logged"] == []


def test_verls_own_patch_that_came_first_is_taken_back(found: Found) -> None:
    answer = found["patched_by_verl"]
    assert (answer["patched"], answer["restored"], answer["flag"]) == (True, True, False)


def test_a_dispatchers_wrapper_that_kept_nothing_gives_way_to_megatrons_own(found: Found) -> None:
    assert found["dispatcher"]["restored"]


def test_installing_twice_changes_nothing(found: Found) -> None:
    """And no warning says that an NPU has no replay."""
    answer = found["install_again"]
    assert answer["once"] == answer["again"] != []
    assert answer["warned"] == []


@pytest.mark.parametrize("case", ["uninstall", "disabled"])
def test_all_of_it_is_verls_own_again_or_still(found: Found, case: str) -> None:
    """Also in modules that bound our names by from ... import."""
    answer = found[case]
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
    answer = found[case]
    (logged,) = answer["logged"]
    for word in ("[npu_replay]", *words):
        assert word in logged
    for word in ("ReplayError", *words):
        assert word in answer["raised"], answer["raised"]
    kept = {name for name, is_ours in answer["ours"].items() if is_ours}
    assert all(name.endswith(".apply_router_replay_patch") for name in kept), "all or nothing"


def test_a_verl_without_apply_router_replay_patch_is_told_as_an_unknown_one(found: Found) -> None:
    """There is nothing to put the refusal in then, and that must not be the error."""
    answer = found["no_apply"]
    (logged,) = answer["logged"]
    for word in ("another than npu_replay knows", "apply_router_replay_patch"):
        assert word in logged
    assert not any(answer["ours"].values()), answer["ours"]


def test_without_strictness_the_job_runs_as_if_npu_replay_were_not_there(found: Found) -> None:
    answer = found["missing_name, lenient"]
    assert len(answer["logged"]) == 1
    assert not any(answer["ours"].values()), answer["ours"]
    assert "ReplayError" not in (answer["raised"] or "")


def test_somebody_elses_routing_is_refused_by_name(found: Found) -> None:
    answer = found["strangers_routing"]
    assert "TopKRouter.routing: somebody else's routing" in answer["raised"]
    assert "with RoutingReplay" in answer["raised"]
    assert "stranger" in answer["raised"]


def test_a_routing_that_only_routes_is_nobodys_replay_whoever_wrote_it(found: Found) -> None:
    """As MegatronAdaptor, a bridge or TransformerEngineNPU may replace it for their accelerator."""
    assert found["adaptors_routing"]["raised"] is None


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
    transformers_4.lend()
    logging.getLogger("npu_replay").addHandler(_Keeps(logging.ERROR))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        importlib.import_module(task["first"])
        for name in (PATCH, UTILS, ENGINE):
            importlib.import_module(name)
    told = [str(one.message) for one in said if "router replay" in str(one.message)]
    told += [one[1].pattern for one in warnings.filters if one[1] and "router replay" in one[1].pattern]
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = pool.starmap(_case, task["cases"].values(), chunksize=1)
    return {name: answer | {"warned": told} for name, answer in zip(task["cases"], found, strict=True)}


def _case(do: str, env: dict[str, str]) -> Answer:
    os.environ.update(env)
    patch = sys.modules[PATCH]
    utils = sys.modules[UTILS]
    answer: Answer = globals()[f"_{do}"](patch, utils)
    npu_replay = importlib.import_module("npu_replay")
    answer["ours"] = {
        f"{module.rpartition('.')[2]}.{name}": _is_ours(getattr(sys.modules[module], name))
        for module, names in LOOKED_AT.items()
        for name in names
        if hasattr(sys.modules[module], name)  # 0.7.0's engine knows no replay
    }
    try:
        if do not in ("uninstall", "no_apply"):
            patch.apply_router_replay_patch()  # type: ignore[attr-defined]
        answer["raised"] = None
    except Exception as error:
        answer["raised"] = f"{type(error).__name__}: {error}"
    return answer | {"logged": _Keeps.said, "patches": len(npu_replay.report().patches)}


def _is_ours(found: Any) -> bool:
    """Does a function, or a class's answer to what an engine asks, go through npu_replay?"""
    for name in ("set_global_router_replay_action", "is_r2_record_action"):
        found = getattr(found, name, found)
    return bool(found.__code__.co_filename.endswith(("compat/verl/functions.py", "compat/verl/install.py")))


# What is done, after verl or after npu_replay and verl; npu_replay is there when it returns


def _nothing(patch: Any, utils: Any) -> Answer:
    return {}


def _install_again(patch: Any, utils: Any) -> Answer:
    npu_replay: Any = sys.modules["npu_replay"]
    once = [patch.where for patch in npu_replay.report().patches]
    npu_replay.install()
    return {"once": once, "again": [patch.where for patch in npu_replay.report().patches]}


def _uninstall(patch: Any, utils: Any) -> Answer:
    sys.modules["npu_replay"].uninstall()
    return {}


def _patched_by_verl(patch: Any, utils: Any) -> Answer:
    """As for external_lib of 0.7's workers: their own patch is applied by then."""
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    pristine = router.routing.__code__
    patch.apply_router_replay_patch()
    patched = router.routing.__code__ is not pristine
    importlib.import_module("npu_replay")
    restored = router.routing.__code__.co_code == pristine.co_code
    return {"patched": patched, "restored": restored, "flag": hasattr(router, "_router_replay_patched")}


def _unknown_argument(patch: Any, utils: Any) -> Answer:
    native = utils.set_router_replay_data

    def set_router_replay_data(layers: Any, mask: Any, config: Any, novelty: Any = None) -> None:
        return native(layers, mask, config)

    set_router_replay_data.__module__ = utils.__name__
    utils.set_router_replay_data = set_router_replay_data
    return {}


def _missing_name(patch: Any, utils: Any) -> Answer:
    del utils.pp_gather
    return {}


def _no_apply(patch: Any, utils: Any) -> Answer:
    del patch.apply_router_replay_patch
    return {}


def _dispatcher(patch: Any, utils: Any) -> Answer:
    """A wrapper of the dispatcher's that kept nothing of what it wraps."""
    moe = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher = moe.MoEAlltoAllTokenDispatcher
    pristine = dispatcher.preprocess.__code__
    made: dict[str, Any] = {}
    exec(compile("def preprocess(self, *_): ...", "router_replay_patch.py", "exec"), made)
    dispatcher.preprocess = made["preprocess"]
    dispatcher._preprocess_patched = True
    importlib.import_module("npu_replay")
    return {"restored": getattr(dispatcher.preprocess, "__code__", None) == pristine}


def _strangers_apply(patch: Any, utils: Any) -> Answer:
    def stranger(self: Any, logits: Any) -> Any:
        raise NotImplementedError

    patch.apply_router_replay_patch = stranger
    return {}


def _strangers_routing(patch: Any, utils: Any) -> Answer:
    router = importlib.import_module("megatron.core.transformer.moe.router")

    def stranger(self: Any, logits: Any) -> Any:
        return RoutingReplay.pop_forward(logits)  # type: ignore[name-defined]  # noqa: F821

    router.TopKRouter.routing = stranger
    return {}


def _adaptors_routing(patch: Any, utils: Any) -> Answer:
    router = importlib.import_module("megatron.core.transformer.moe.router")

    def routing(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        return router.topk_routing_with_score_function(logits, self.topk, router_replay=self.router_replay)

    routing.__module__ = "megatron_adaptor.patches.megatron.router"
    router.TopKRouter.routing = routing
    return {}
