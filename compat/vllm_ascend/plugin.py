"""Capture routed experts on vllm-ascend, as a plug-in of vLLM, where NPU_REPLAY_VLLM_ASCEND=on.

vLLM calls `register` in each of its processes. In a worker it waits for the model runner. What can't be
captured ends the start before weights are loaded; the rest is installed when vLLM makes its capturer: weights
are loaded then, and no graph is captured yet.

Asks:     the releases of both products, the engine's config, and each worker whether it captures.
Changes:  two methods of the model runner, one of the executor; what `CapturePoints` and `ReadOut` name; a
          variable of Ray.
Undone:   all but that variable, in the process that is told to.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from npu_replay import environment
from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Change, Patches
from npu_replay.compat.probe import Capability, Product, unusable
from npu_replay.compat.vllm_ascend import parts, releases
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.capture_points import CapturePoints, layers, refuse_foreign
from npu_replay.compat.vllm_ascend.read_out import ReadOut
from npu_replay.compat.vllm_ascend.self_check import SelfCheck
from npu_replay.environment import AUTOLOAD, STRICT, VLLM_ASCEND
from npu_replay.errors import ReplayError
from npu_replay.rollout.model_config import RoutedModel

logger = logging.getLogger(__name__)

CAPABILITY = "capture on vllm-ascend"
GROUP = "vllm.general_plugins"
NAME = releases.PLUGIN
"""The group in which vLLM looks for plug-ins, and this one's name."""

_RUNNERS = ("vllm_ascend.worker.model_runner_v1", "vllm_ascend.worker.v2.model_runner")
_EXECUTOR = "vllm.v1.executor.abstract"
_FLAG = "enable_return_routed_experts"
_INIT = "init_routed_experts_capturer"
_TO_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_PARALLEL = (
    *("pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"),
    *("enable_dbo", "ubatch_size"),
    *("prefill_context_parallel_size", "decode_context_parallel_size", "enable_expert_parallel"),
)

_LOADED = (
    f"npu_replay installed beside vLLM; {AUTOLOAD}=on where an image has it off; {NAME} in "
    "VLLM_PLUGINS, without spaces, where that is set"
)
"""What vLLM loads the plug-in with."""

_patches = Patches("routed experts of vllm-ascend")
_attached = Patches("routed experts of vllm-ascend, in a worker")


def wanted() -> bool:
    """Return whether npu_replay is to capture."""
    return environment.read(VLLM_ASCEND, False) and not environment.disabled()


def filtered() -> str:
    """Return what keeps vLLM from loading the plug-in, as far as this process can tell; empty if nothing."""
    if not environment.read(AUTOLOAD, True):
        return f"{AUTOLOAD}={os.environ[AUTOLOAD]} leaves npu_replay out"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):  # vLLM strips no spaces either
        return f"VLLM_PLUGINS={allowed} leaves {NAME} out: export VLLM_PLUGINS={allowed},{NAME}"
    entry_points = importlib.metadata.entry_points(group=GROUP, name=NAME)
    return "" if entry_points else "vLLM finds no plug-in of npu_replay: it isn't installed as a distribution"


def left_out() -> ReplayError | None:
    """Return why vLLM won't load the plug-in though it is wanted; None if it will."""
    why = filtered() if wanted() else ""
    if not why:
        return None
    return ReplayError(
        f"{VLLM_ASCEND} is set, and npu_replay captures nothing",
        where="rollout",
        expected=_LOADED,
        got=why,
        cause="a filter from before; or npu_replay on PYTHONPATH alone, where vLLM finds no plug-in",
    )


def capability(product: Product, vllm: Product) -> Capability:
    """Return whether npu_replay captures routes here."""
    if not product.usable:
        return unusable(CAPABILITY, product)
    problem = releases.unknown(product.version, vllm.version)
    if problem is not None:
        return Capability(CAPABILITY, "broken" if wanted() else "missing", problem.problem, problem.cause)
    if environment.disabled():
        return Capability(CAPABILITY, "missing", "NPU_REPLAY_DISABLE=on: npu_replay changes nothing")
    if not wanted():
        remedy = f"{VLLM_ASCEND}=on in the engine's environment"
        return Capability(CAPABILITY, "missing", "it is off; this release is known", remedy)
    why = filtered()
    if why:
        return Capability(CAPABILITY, "broken", why, _LOADED)
    pair = f"vllm-ascend {product.version} beside vLLM {vllm.version}"
    words = f"{pair}: every quantization and layout, checked in the first steps"
    return Capability(CAPABILITY, "works", words)


def register() -> None:
    """Prepare to capture, if that is asked for; refuse a release that isn't known."""
    if not wanted():
        return
    version = probe.installed("vllm-ascend")
    vllm = probe.installed("vllm")
    if not version:
        words = "[npu_replay] %s is set, and there is no vllm-ascend here: nothing is changed"
        logger.warning(words, VLLM_ASCEND)
        return
    problem = releases.unpaired(version, vllm) or parts.missing_module(*_RUNNERS)
    if _refuse(problem or parts.missing_module(_EXECUTOR)):
        return
    _tell_workers_of_ray()
    for module in _RUNNERS:
        import_hook.when_imported(module, "capture of routed experts", _guard, ends=True)

    def ask(module: Any) -> None:
        why = "asks whether every worker captures"
        _patches.wrap(module.Executor, "initialize_from_config", _asked, why)

    import_hook.when_imported(_EXECUTOR, "the question whether all workers capture", ask, ends=True)


def _tell_workers_of_ray() -> None:
    """Add our variables to those that vLLM's Ray executor copies to its workers."""
    # Without them each worker would run as released, without an error.
    before = os.environ.get(_TO_RAY)
    named = [name.strip() for name in (before or "").split(",")]
    names = ",".join(dict.fromkeys([*filter(None, named), VLLM_ASCEND, STRICT]))
    if names != before:
        os.environ[_TO_RAY] = names
        _patches.add(Change(_TO_RAY, "workers of Ray have the switch"))


def _refuse(problem: ReplayError | None) -> bool:
    """Raise the error, or log it if strict is off; return whether there is one."""
    if problem is not None and environment.strict():
        raise problem
    if problem is not None:
        logger.error("%s. The engine runs as released", problem)
    return problem is not None


def _guard(module: ModuleType) -> None:
    """Have a worker's model runner checked when it is made, and captured once its capturer exists."""
    runner = module.NPUModelRunner
    _patches.wrap(runner, "__init__", _made, "refuses what can't be captured, before weights are loaded")
    if hasattr(runner, _INIT):
        _patches.wrap(runner, _INIT, _capturing, "the weights are there, no graph is")


def _asked(original: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to start an engine of which a worker doesn't capture."""
    # Workers may run on other nodes. One without npu_replay, or without its variable, returns what its
    # release has: zeros, or from 0.28 on rows of an earlier step.
    made = original(executor, *args, **kwargs)
    if not getattr(executor.vllm_config.model_config, _FLAG, False):
        return made
    try:
        answers = executor.collective_rpc(captures)
    except Exception as error:  # noqa: BLE001  vLLM's own error, if a worker can't import npu_replay
        got = f"{type(error).__name__}: {error}"
    else:
        without = [str(rank) for rank, answer in enumerate(answers) if not answer]
        got = f"none on worker {', '.join(without)} of {len(answers)}" if without else ""
    if got:
        _refuse(
            ReplayError(
                "not every worker of this engine captures",
                where="vllm-ascend",
                expected="npu_replay, its variable and its name in VLLM_PLUGINS, where that is set, on every "
                "node",
                got=got,
                cause="a node of another environment",
            )
        )
    return made


def captures(worker: object) -> bool:
    """Return whether npu_replay captures in this process; called in vLLM's workers, with the worker."""
    return any(_attached)


def _made(original: Callable[..., Any], runner: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    if not getattr(vllm_config.model_config, _FLAG, False):
        logger.warning("[npu_replay] %s is set, but not %s: no routes are captured", VLLM_ASCEND, _FLAG)
    elif not hasattr(runner, _INIT):
        _refuse(
            ReplayError(
                "this model runner knows no routes",
                where=f"{type(runner).__module__}, vllm-ascend {probe.installed('vllm-ascend')}",
                expected=_INIT,
                got="none there",
                cause="VLLM_USE_V2_MODEL_RUNNER=1 before 0.28.0rc1, or a release after 0.30",
            )
        )
    else:
        _refuse(_not_captured(vllm_config))
    original(runner, vllm_config, *args, **kwargs)


def _capturing(original: Callable[..., Any], runner: Any) -> None:
    original(runner)
    # Called again for the same runner: vLLM 0.22 makes a KV cache to measure graphs with, before its own.
    if _attached.has(runner, "execute_model"):
        _attached.undo()
    if _refuse(_not_captured(runner.vllm_config)):
        return
    try:
        attach(runner)
    except ReplayError as error:
        if _refuse(error):
            _attached.undo()
            _patches.undo()


_OF_DRAFTS = ("method", "enable_adaptive_verification")


def _not_captured(vllm_config: Any) -> ReplayError | None:
    """Return what this worker lacks for a capture, or plans against it; None if nothing."""
    try:
        parts.check(probe.installed("vllm-ascend"))
    except ReplayError as problem:
        return problem
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    drafts = getattr(vllm_config, "speculative_config", None)
    plan = {name: getattr(parallel, name, None) for name in _PARALLEL} | {
        "kv_transfer_config": getattr(vllm_config, "kv_transfer_config", None),
        "additional_config": getattr(vllm_config, "additional_config", None),
        "compilation_config": getattr(vllm_config, "compilation_config", None),
        "async_scheduling": getattr(vllm_config.scheduler_config, "async_scheduling", None),
        "enforce_eager": getattr(model, "enforce_eager", None),
        "model": model.hf_text_config,
        "speculative_config": {name: getattr(drafts, name, None) for name in _OF_DRAFTS},
    }
    version = releases.of_release(probe.installed("vllm-ascend"), probe.installed("vllm"))
    return releases.not_captured(version, plan)


def attach(runner: Any) -> Capture:
    """Capture in a worker whose vLLM has just made its capturer: weights are loaded, no graph captured."""
    from vllm.distributed import get_tp_group
    from vllm_ascend.ops.fused_moe.moe_comm_method import MoECommMethod

    if _attached.has(MoECommMethod, "prepare"):
        raise ReplayError(
            "an engine of this process is captured already",
            where="vllm-ascend",
            expected="one engine a process",
            got="another model runner",
            cause="two LLMs in one process: start each in its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)",
        )
    module = sys.modules[parts.CAPTURER]
    capturer = getattr(runner, "routed_experts_capturer", None) or module.RoutedExpertsCapturer.get_instance()
    buffer = getattr(capturer, "device_buffer", None)
    buffer = capturer._device_buffer if buffer is None else buffer
    refuse_foreign(type(capturer).capture, ("routed_experts_capturer", "routed_experts_capture"), "capture")
    routed_layers = layers(runner.get_model())
    model = _held_against_config(runner, routed_layers, buffer)
    parallel = runner.vllm_config.parallel_config
    tp = get_tp_group()
    spread = parallel.enable_expert_parallel and tp.world_size > 1
    group = tp if spread else None
    where = f"vllm-ascend {probe.installed('vllm-ascend')}"
    names = {
        number: getattr(layer, "layer_name", type(layer).__name__) for number, layer in routed_layers.items()
    }
    check = SelfCheck(names, model.num_experts, group, where, speaks=tp.rank_in_group == 0)
    capture = Capture(buffer, check, group)
    CapturePoints(capture, routed_layers, tp, parallel).install(
        _attached, capturer, selects=not parts.by_router()
    )
    ReadOut(runner, capturer, capture).install(_attached)
    return capture


def _held_against_config(
    runner: Any, routed_layers: Mapping[int, torch.nn.Module], buffer: torch.Tensor
) -> RoutedModel:
    """Return the model of the runner's config, after comparing its MoE layers with those found."""
    model = RoutedModel.of(runner.vllm_config.model_config.hf_text_config)
    own = [number for number, module in routed_layers.items() if getattr(module, "zero_expert_num", 0)]
    if own:
        raise ReplayError(
            f"layers {own} choose experts that compute nothing",
            where="vllm-ascend",
            expected="the trainer's experts alone",
            got="zero experts",
        )
    ReplayError.unless(
        sorted(routed_layers) == list(model.sparse) and buffer.shape[1] > max(routed_layers),
        "the layers that route aren't those of the model's config",
        where="vllm-ascend",
        expected=f"layers {list(model.sparse)} in {buffer.shape[1]} columns",
        got=f"layers {sorted(routed_layers)}",
        cause="layers that this npu_replay doesn't find in vllm-ascend, or doesn't read in the model's "
        "config",
    )
    return model
