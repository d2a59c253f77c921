"""Puts npu_replay in the place of verl's router replay, in every release from 0.7.0 on.

Asks:     when verl's modules are imported, their names and the arguments of what it replaces; whose they are.
Changes:  `forward_backward_batch` of an engine and of 0.7's actor, `disable_adapter`, reference passes;
          verl's functions, which call npu_replay's in a pass, also where `from ... import` has bound them;
          `apply_router_replay_patch`; RouterReplay's `set_router_replay_action`, which takes Megatron's
          actions too. Megatron's routing is put back where verl's patch came first.
Undone:   by `npu_replay.uninstall()`, and all of it where one name isn't as expected; each RouterReplay
          leaves verl's list with its router. Engines that are alive go on as verl's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from npu_replay import environment
from npu_replay.compat.megatron import foreign_routing
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.patching import class_source, import_hook, known_names
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import functions
from npu_replay.compat.verl.engine_adapter import EngineAdapter, LegacyActorAdapter
from npu_replay.compat.verl.engine_pass import reference, run, waiting, without_adapter
from npu_replay.compat.verl.tensors import UTILS
from npu_replay.errors import ReplayError, described

PATCH = "verl.utils.megatron.router_replay_patch"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
MINDSPEED = "verl.workers.engine.mindspeed.transformer_impl"
ACTOR = "verl.workers.actor.megatron_actor"
WORKERS = "verl.workers.megatron_workers"
"""The names of 0.7's own actor."""

_WHAT = "router replay of verl"
_IN_A_PASS = "in a pass of an engine npu_replay answers"
_REFERENCE = "a reference pass is never replayed"
_WAITS = "the action waits for the pass"
_APPLY = "apply_router_replay_patch"
_PASS = "forward_backward_batch"
_ONE_PASS = "one pass: ranks leave together, figures"

_NEEDED: dict[str, tuple[str, ...]] = {
    PATCH: ("RouterReplay", "RouterReplayAction", _APPLY),
    UTILS: ("merge_router_topk_indices", "pp_gather", "set_router_replay_data", "RouterReplayHelper"),
    ENGINE: (f"MegatronEngine.{_PASS}",),
    ACTOR: (f"MegatronPPOActor.{_PASS}",),
    WORKERS: (),
    MINDSPEED: (),
}
"""The modules that have router replay or bind its names with `from ... import`, and what has to be there."""
_OF_CLASSES: dict[str, tuple[Callable[..., Any], ...]] = {
    "RouterReplay": (
        functions.set_global_router_replay_action,
        functions.clear_global_router_replay_action,
        functions.clear_global_indices,
    ),
    "RouterReplayHelper": (
        functions.get_micro_batch_router_list,
        functions.is_r2_record_action,
        functions.is_replay_forward_action,
        functions.is_replay_backward_action,
    ),
}
"""The static methods of verl's classes that a pass answers."""
_OF_UTILS: tuple[Callable[..., Any], ...] = (
    functions.merge_router_topk_indices,
    functions.reorder_and_merge_vpp_layers,
    functions.pp_gather,
    functions.set_router_replay_data,
    functions.build_r3_replay_mask,
    functions.align_r3_router_replay_data,
    functions.set_model_router_replay_action,
)
"""The functions of UTILS that a pass answers; no release has all."""
_BY_VERL: dict[tuple[str, str, str], dict[str, str]] = {
    ("router", "TopKRouter", "_router_replay_patched"): {
        "routing": "",
        "__init__": "original_init",
        "_hash_routing": "",
    },
    ("token_dispatcher", "MoEAlltoAllTokenDispatcher", "_preprocess_patched"): {
        "preprocess": "original_preprocess"
    },
}
"""What verl's own patch replaces in Megatron, by module, class and the mark that it leaves there. Each method
has the name under which its replacement keeps the original, if it does.
"""

_patches = Patches(_WHAT)
_given_up: list[Exception] = []


def install() -> None:
    """Replace verl's router replay, now or when it is imported. What is replaced already stays."""
    _given_up.clear()
    for name in _NEEDED:
        import_hook.when_imported(name, f"{_WHAT} ({name})", _all_or_nothing)


def _all_or_nothing(module: Any) -> None:
    """Change a module; if that fails, put verl's own back everywhere, and have verl refuse to start."""
    if _given_up:
        return
    try:
        known_names.check(module, dict.fromkeys(_NEEDED[module.__name__], ()), _WHAT, "verl")
        _change(module)
        _rebind()
    except Exception as error:
        _given_up.append(error)
        _patches.undo()
        patch = sys.modules.get(PATCH)
        if hasattr(patch, _APPLY) and environment.strict():  # it lacks where its absence is the problem
            _patches.wrap(patch, _APPLY, _apply, "says why replay can't be done, when an engine is built")
            _rebind()
        raise


def _change(module: Any) -> None:
    if module.__name__ == PATCH:
        _serve_class(module.RouterReplay)
        functions.complete(module.RouterReplay, module.RouterReplayAction, _patches)
        _patches.wrap(module, _APPLY, _apply, "leaves Megatron's routing as it is")
        _undo_verls()
    elif module.__name__ == UTILS:
        _serve_class(module.RouterReplayHelper)
        for ours in _OF_UTILS:
            if (theirs := getattr(module, ours.__name__, None)) is not None:
                served = functions.served(ours, theirs, module.__name__)
                _patches.set(module, ours.__name__, served, _IN_A_PASS)
    elif module.__name__ == ENGINE:
        cls = module.MegatronEngine
        if hasattr(module, _APPLY):  # 0.7.0's engine has no router replay
            _patches.wrap(cls, _PASS, functools.partial(run, EngineAdapter), _ONE_PASS)
        if hasattr(cls, "disable_adapter"):
            _patches.wrap(cls, "disable_adapter", without_adapter, _REFERENCE)
    elif module.__name__ == ACTOR:
        cls = module.MegatronPPOActor
        _patches.wrap(cls, _PASS, functools.partial(run, LegacyActorAdapter), _ONE_PASS)
        _patches.wrap(cls, "update_policy", waiting, _WAITS)
    elif module.__name__ == WORKERS:
        cls = module.ActorRolloutRefWorker
        _patches.wrap(cls, "compute_ref_log_prob", reference, _REFERENCE)
        _patches.wrap(cls, "compute_log_prob", waiting, _WAITS)


def _serve_class(cls: Any) -> None:
    for ours in _OF_CLASSES[cls.__name__]:
        served = functions.served(ours, getattr(cls, ours.__name__), described(cls))
        _patches.set(cls, ours.__name__, staticmethod(served), _IN_A_PASS)


def _apply(original: Callable[[], None]) -> None:
    """Raise a ReplayError if a change at import failed, or somebody else's routing is in place."""
    import_hook.refuse_failures()
    _undo_verls()
    from megatron.core.transformer.moe.router import TopKRouter

    # A routing that asks a router's `router_replay`, as Megatron's does, asks the one that is handed over.
    others = foreign_routing.replays(TopKRouter) - {foreign_routing.ASKED}
    if others:
        routing = inspect.getattr_static(TopKRouter, "routing")
        raise ReplayError(
            f"somebody else's routing is in the place of Megatron's, with {', '.join(sorted(others))}",
            where="TopKRouter.routing",
            expected="Megatron's own, or one that has no replay of its own",
            got=described(routing),
            cause="another replay patch in this process; remove it, or set NPU_REPLAY_DISABLE=on",
        )
    # Routers get verl's RouterReplay, as by verl's patch: verl's functions use it outside a pass.
    router_init.hand_over(functools.partial(functions.made_for, sys.modules[PATCH].RouterReplay))


def _undo_verls() -> None:
    """Put Megatron's functions back where verl's own patch came first."""
    for (place, name, mark), methods in _BY_VERL.items():
        module: Any = sys.modules.get(f"megatron.core.transformer.moe.{place}")
        cls: Any = getattr(module, name, None)
        if cls is None or mark not in vars(cls):
            continue
        for method, kept in methods.items():
            theirs = vars(cls).get(method)
            # This is a hack: functools.wraps copies names, not code, so verl's wrappers are told by the file
            # of their code.
            code = getattr(theirs, "__code__", None)
            if code is not None and code.co_filename.endswith("router_replay_patch.py"):
                inner = dict(zip(code.co_freevars, theirs.__closure__ or (), strict=True)).get(kept)
                setattr(cls, method, inner.cell_contents if inner else class_source.method(cls, method))
        delattr(cls, mark)


def _rebind() -> None:
    """Rebind what verl's modules took with `from ... import`: verl's or, if it was imported later, ours."""
    loaded = [sys.modules[name] for name in _NEEDED if name in sys.modules]
    names = (_APPLY, *(function.__name__ for function in _OF_UTILS))
    for home, name in [(home, name) for home in loaded for name in names if _patches.has(home, name)]:
        ours = getattr(home, name)
        original = getattr(ours, "__wrapped__", None)
        if original is None:  # somebody has replaced ours since
            continue
        for user in loaded:
            bound = vars(user).get(name)
            if bound is original or (bound is ours and not _patches.has(user, name)):
                setattr(user, name, ours)
                _patches.note(user, name, "bound here by from ... import", original, ours)
