"""verl and npu_replay in one order or the other, and what is found in verl's modules then."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from typing import Any

import transformers_4

PATCH = "verl.utils.megatron.router_replay_patch"
UTILS = "verl.utils.megatron.router_replay_utils"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
said: list[str] = []


class _Keeps(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


def ours(module: str, name: str) -> bool:
    return getattr(sys.modules[module], name).__module__.startswith("npu_replay")


def stranger(self: Any, logits: Any) -> Any:
    raise NotImplementedError


def verl() -> tuple[Any, Any]:
    return importlib.import_module(PATCH), importlib.import_module(UTILS)


def main(task: dict[str, Any]) -> dict[str, Any]:
    case = task["case"]
    warnings.simplefilter("ignore")
    transformers_4.lend()
    logging.getLogger("npu_replay").addHandler(_Keeps(logging.ERROR))
    answer: dict[str, Any] = {}
    if case in ("first", "uninstalled", "twice"):
        npu_replay = importlib.import_module("npu_replay")

        verl()
        importlib.import_module(ENGINE)
        if case == "twice":
            answer["once"] = [patch.where for patch in npu_replay.report().patches]
            npu_replay.install()
            answer["again"] = [patch.where for patch in npu_replay.report().patches]
    elif case == "last":  # external_lib of 0.7's workers: their own patch is applied by then
        patch, _ = verl()
        importlib.import_module(ENGINE)
        router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
        pristine = router.routing.__code__
        patch.apply_router_replay_patch()
        answer["patched"] = router.routing.__code__ is not pristine
        npu_replay = importlib.import_module("npu_replay")

        answer["restored"] = router.routing.__code__.co_code == pristine.co_code
        answer["flag"] = hasattr(router, "_router_replay_patched")
    elif case == "unknown argument":
        _, utils = verl()
        native = utils.set_router_replay_data

        def set_router_replay_data(layers: Any, mask: Any, config: Any, novelty: Any = None) -> None:
            return native(layers, mask, config)

        set_router_replay_data.__module__ = utils.__name__
        utils.set_router_replay_data = set_router_replay_data
        npu_replay = importlib.import_module("npu_replay")
    elif case == "missing name":
        _, utils = verl()
        del utils.pp_gather
        npu_replay = importlib.import_module("npu_replay")
    elif case == "no apply":
        patch, _ = verl()
        del patch.apply_router_replay_patch
        npu_replay = importlib.import_module("npu_replay")
    elif case == "a dispatcher's wrapper that kept nothing":
        verl()
        dispatcher = importlib.import_module(
            "megatron.core.transformer.moe.token_dispatcher"
        ).MoEAlltoAllTokenDispatcher
        pristine = dispatcher.preprocess.__code__
        made: dict[str, Any] = {}
        exec(compile("def preprocess(self, *_): ...", "router_replay_patch.py", "exec"), made)
        dispatcher.preprocess, dispatcher._preprocess_patched = made["preprocess"], True
        npu_replay = importlib.import_module("npu_replay")

        answer["restored"] = getattr(dispatcher.preprocess, "__code__", None) == pristine
    elif case == "somebody else's":
        patch, _ = verl()
        patch.apply_router_replay_patch = stranger
        npu_replay = importlib.import_module("npu_replay")
    elif case == "somebody else's routing":
        npu_replay = importlib.import_module("npu_replay")

        patch, _ = verl()
        importlib.import_module("megatron.core.transformer.moe.router").TopKRouter.routing = stranger
    else:
        raise SystemExit(f"no case {case}")

    if case == "uninstalled":
        npu_replay.uninstall()
    answer["ours"] = {
        f"{module.rpartition('.')[2]}.{name}": ours(module, name)
        for module, names in {
            PATCH: ("RouterReplay", "apply_router_replay_patch"),
            UTILS: (
                "RouterReplay",
                "set_router_replay_data",
                "merge_router_topk_indices",
                "RouterReplayHelper",
            ),
            ENGINE: ("RouterReplay", "set_router_replay_data", "apply_router_replay_patch", "pp_gather"),
        }.items()
        if module in sys.modules
        for name in names
        if hasattr(sys.modules[module], name)  # 0.7.0's engine knows no replay
    }
    try:
        if case not in ("uninstalled", "no apply"):
            sys.modules[PATCH].apply_router_replay_patch()
        answer["raised"] = None
    except Exception as error:
        answer["raised"] = f"{type(error).__name__}: {error}"
    return answer | {"logged": said, "patches": len(npu_replay.report().patches)}
