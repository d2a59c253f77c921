"""verl and npu_replay in one order or the other, and what is found in verl's modules then.

What comes first is imported once; each case goes on from there in a fork of its own.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import warnings
from typing import Any, ClassVar

import transformers_4

PATCH = "verl.utils.megatron.router_replay_patch"
UTILS = "verl.utils.megatron.router_replay_utils"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
LOOKED_AT = {
    PATCH: ("RouterReplay", "apply_router_replay_patch"),
    UTILS: ("RouterReplay", "set_router_replay_data", "merge_router_topk_indices", "RouterReplayHelper"),
    ENGINE: ("RouterReplay", "set_router_replay_data", "apply_router_replay_patch", "pp_gather"),
}
Answer = dict[str, Any]


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
    patch, utils = sys.modules[PATCH], sys.modules[UTILS]
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


def stranger(self: Any, logits: Any) -> Any:
    raise NotImplementedError


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
    dispatcher.preprocess, dispatcher._preprocess_patched = made["preprocess"], True
    importlib.import_module("npu_replay")
    return {"restored": getattr(dispatcher.preprocess, "__code__", None) == pristine}


def _strangers_apply(patch: Any, utils: Any) -> Answer:
    patch.apply_router_replay_patch = stranger
    return {}


def _strangers_routing(patch: Any, utils: Any) -> Answer:
    importlib.import_module("megatron.core.transformer.moe.router").TopKRouter.routing = stranger
    return {}
