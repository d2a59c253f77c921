"""Reads from a framework's config how it starts its rollout engine, and checks that plan for routes.

Frameworks name an engine's arguments by keys of their own. `plan_of` returns them by the engine's names, for
the tables in `compat.vllm`, `compat.sglang` and `compat.vllm_ascend`; an error names the framework's key.

    verl      actor_rollout_ref.rollout: keys of its own, and engine_kwargs.<engine>
    ROLL      a worker's strategy_args.strategy_config
    ms-swift  vllm_<argument>, and vllm_engine_kwargs
    TRL       vllm_<argument>
    slime     sglang_<argument>, on its command line --sglang-<argument>
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from npu_replay import environment
from npu_replay.compat import probe
from npu_replay.compat.sglang import engine_plan as sglang
from npu_replay.compat.vllm import engine_plan as vllm
from npu_replay.compat.vllm import releases as vllm_releases
from npu_replay.compat.vllm_ascend import plugin
from npu_replay.compat.vllm_ascend import releases as vllm_ascend
from npu_replay.errors import ReplayError
from npu_replay.rollout import engine_plan
from npu_replay.rollout.engine_plan import number
from npu_replay.rollout.model_config import is_there
from npu_replay.rollout.release_rules import tells_release

logger = logging.getLogger(__name__)

Framework = Literal["verl", "ROLL", "ms-swift", "TRL", "slime"]

_ENGINES: dict[str, tuple[Mapping[str, engine_plan.Kind], Mapping[str, str]]] = {
    "vllm": (vllm.KINDS, vllm.SHORT),
    "sglang": ({}, sglang.SHORT),
}
"""The kinds of each engine's arguments, where their names don't tell, and other names of them."""


@dataclass(frozen=True)
class EnginePlan:
    """Holds the arguments that a framework starts its engine with.

    Attributes:
        engine: «vllm», «sglang», or another, of which nothing is known.
        arguments: the arguments, by their Python names in the engine.
        keys: the key of each argument in the framework's config.
        synchronous: what turns asynchronous scheduling of vLLM off in the framework's config.
    """

    engine: str
    arguments: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    synchronous: str = "async_scheduling=False"

    def put(self, argument: str, value: Any, key: str) -> None:
        """Plan an argument, in place of an earlier value. None changes nothing."""
        if value is not None:
            self.arguments[argument] = value
            self.keys[argument] = key

    def put_all(self, options: Any, key: str) -> None:
        """Plan the arguments of a mapping, JSON or object, whose keys are the engine's, as options or not.

        `key` is the key of each in the framework's config, with {} for the engine's own.
        """
        kinds, short = _ENGINES.get(self.engine, ({}, {}))
        mapping = options if isinstance(options, Mapping) else engine_plan.as_mapping(options)
        for written, value in mapping.items():
            argument, read = engine_plan.as_a_config_has_it(str(written), value, kinds, short)
            self.put(argument, read, key.format(written))


def plan_of(framework: Framework, config: Any) -> EnginePlan:
    """Return the plan of the engine that a framework starts.

    Args:
        config: of verl the `actor_rollout_ref`, of ROLL the config of a worker, of ms-swift, TRL and slime
            their arguments: a DictConfig, dict, dataclass or namespace.
    """
    return _READERS[framework](config)


def refusal(plan: EnginePlan) -> ReplayError | None:
    """Return why the engine that is installed here gives no routes, or wrong ones, with this plan."""
    versions = {product.name: product.version for product in probe.products() if product.installed}
    version = versions.get(plan.engine, "")
    ascend = versions.get("vllm-ascend", "")
    if plan.engine == "sglang" and version:
        device = "npu" if "torch_npu" in versions else "cuda"
        return sglang.refusal(version, device) or sglang.clash(version, device, plan.arguments, plan.keys)
    if plan.engine != "vllm":
        return None
    rules = vllm_ascend.of_release(ascend, version)
    ascend_rules = rules if tells_release(rules) else ""
    captures = bool(ascend) and plugin.wanted()
    never = plugin.left_out() if ascend else None
    if never is None and ascend_rules:
        never = vllm_ascend.refusal(ascend_rules, {}, version, capture=captures)
    never = never or vllm.refusal(version, ascend)
    never = never or vllm.clash(version, plan.arguments, ascend_rules, capture=captures, keys=plan.keys)
    return never or _schedules_ahead(plan, version, ascend_rules)


def _schedules_ahead(plan: EnginePlan, version: str, ascend: str) -> ReplayError | None:
    """Return the error of a plan that leaves asynchronous scheduling on, where rows are wrong with it."""
    engine, at, rules = ("vllm-ascend", ascend, vllm_ascend) if ascend else ("vllm", version, vllm_releases)
    asked = plan.arguments.get("async_scheduling")
    if not tells_release(at) or not rules.needs_sync(at) or (asked is not None and not asked):
        return None
    if asked is None and vllm_releases.schedules_step_by_step(plan.arguments):
        return None
    return ReplayError(
        f"{engine} {at} hands out other rows than the request's under asynchronous scheduling, which is "
        "on by itself",
        expected=plan.synchronous,
        got=f"async_scheduling={asked}",
        cause="rows are read from a buffer that the next step fills again. From vLLM 0.22.0 and vllm-ascend "
        "0.23.0 on this isn't needed; verl before 0.9.1 drops async_scheduling=False",
    )


def _unasked(plan: EnginePlan) -> ReplayError | None:
    """Return the error of a plan of vLLM that doesn't ask for routes; other frameworks do so themselves."""
    if plan.engine != "vllm":
        return None
    switch = vllm_releases.SWITCH
    places = plan.arguments, engine_plan.as_mapping(plan.arguments.get("aux_output_config"))
    if any(engine_plan.on(place, (switch,)) for place in places):
        return None
    return ReplayError(
        "the engine isn't asked for routes",
        expected=f"--vllm_engine_kwargs '{{\"{switch}\": true}}'",
        got=f"{switch}={plan.arguments.get(switch)}",
        cause="R3 needs the engine's routes, and its first pass would come after a whole generation",
    )


def check(framework: Framework, config: Any) -> None:
    """Raise a ReplayError if the engine gives no routes with this config; without strict, log it."""
    plan = plan_of(framework, config)
    error = refusal(plan) or (_unasked(plan) if framework == "ms-swift" else None)
    if error is None:
        return
    error = error.at(f"{framework}'s config")
    if environment.strict():
        raise error
    logger.error("%s", error)


# ---- the frameworks


def setting(config: Any, *path: str) -> Any:
    """Return the value at a path of a DictConfig, dict or dataclass; None if the path ends before that."""
    for name in path:
        if config is None or isinstance(config, str):
            return None
        get = getattr(config, "get", None)
        config = getattr(config, name, None) if get is None else get(name, None)
    return config


_ROLLOUT = "actor_rollout_ref.rollout."


def _of_verl(config: Any) -> EnginePlan:
    name = str(setting(config, "rollout", "name"))
    plan = EnginePlan(name, synchronous=_VERL_SYNCHRONOUS)
    own: dict[str, dict[str, str]] = {"vllm": _VERL_TO_VLLM, "sglang": _VERL_TO_SGLANG}
    for key, argument in own.get(plan.engine, {}).items():
        plan.put(argument, setting(config, "rollout", key), _ROLLOUT + key)
    options = setting(config, "rollout", "engine_kwargs", plan.engine)
    plan.put_all(options, f"{_ROLLOUT}engine_kwargs.{plan.engine}.{{}}")
    if plan.engine == "vllm":  # verl puts these over what engine_kwargs say
        plan.arguments.pop("async_scheduling", None)
        if any(setting(options, name) for name in ("no_async_scheduling", "no-async-scheduling")):
            plan.put("async_scheduling", False, f"{_ROLLOUT}engine_kwargs.vllm.no_async_scheduling")
        spread = number(setting(config, "rollout", "expert_parallel_size")) > 1
        plan.put("enable_expert_parallel", spread, f"{_ROLLOUT}expert_parallel_size")
        ranks = setting(config, "rollout", "data_parallel_size")
        plan.put("data_parallel_size", ranks if number(ranks) > 1 else None, f"{_ROLLOUT}data_parallel_size")
    _put_mtp_of_verl(plan, setting(config, "rollout", "mtp"))
    if setting(config, "rollout", "disaggregation", "enabled"):
        for argument, value in _VERL_APART.get(plan.engine, {}).items():
            plan.put(argument, value, f"{_ROLLOUT}disaggregation.enabled")
    _put_model(plan, setting(config, "model", "path"), "actor_rollout_ref.model.path")
    return plan


_VERL_SYNCHRONOUS = f"+{_ROLLOUT}engine_kwargs.vllm.no_async_scheduling=True"
_VERL_APART: dict[str, dict[str, Any]] = {
    "sglang": {"disaggregation_mode": "prefill"},
    "vllm": {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
}
"""The arguments with which verl starts engines whose prefill and decode are separate."""
_VERL_TO_VLLM = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    **{
        name: name
        for name in ("data_parallel_size", "enforce_eager", "enable_prefix_caching", "quantization")
    },
}
_VERL_TO_SGLANG = {
    "pipeline_model_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "max_num_seqs": "max_running_requests",
    "quantization": "quantization",
}


def _put_mtp_of_verl(plan: EnginePlan, mtp: Any) -> None:
    """Plan the drafts of `rollout.mtp`, which verl puts over what engine_kwargs say."""
    if not (setting(mtp, "enable") and setting(mtp, "enable_rollout")):
        return
    if plan.engine == "sglang":
        for name in ("speculative_algorithm", "speculative_eagle_topk"):
            plan.put(name, setting(mtp, name), f"{_ROLLOUT}mtp.{name}")
    elif plan.engine == "vllm":
        drafts = {
            "method": setting(mtp, "method"),
            **engine_plan.as_mapping(plan.arguments.get("speculative_config")),
        }
        plan.put("speculative_config", drafts, f"{_ROLLOUT}mtp.enable_rollout")


def _of_roll(config: Any) -> EnginePlan:
    plan = EnginePlan(str(setting(config, "strategy_args", "strategy_name")))
    plan.put_all(setting(config, "strategy_args", "strategy_config"), "strategy_args.strategy_config.{}")
    _put_model(plan, setting(config, "model_args", "model_name_or_path"), "model_args.model_name_or_path")
    return plan


def _prefixed(engine: str, config: Any) -> EnginePlan:
    """Return the plan of arguments whose names begin with the engine's."""
    plan = EnginePlan(engine)
    prefix = f"{engine}_"
    values = config if isinstance(config, Mapping) else vars(config)
    named = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    inner = named.pop("engine_kwargs", None)
    plan.put_all(named, f"{prefix}{{}}")
    plan.put_all(inner, f"{prefix}engine_kwargs: {{}}")
    return plan


def _with_vllm(config: Any) -> EnginePlan:
    """Return the plan of ms-swift or TRL, whose vLLM runs in the trainer; a server is started elsewhere."""
    used = setting(config, "use_vllm") and setting(config, "vllm_mode") != "server"
    plan = _prefixed("vllm", config) if used else EnginePlan("")
    _put_model(plan, setting(config, "model"), "model")
    return plan


def _of_slime(config: Any) -> EnginePlan:
    plan = _prefixed("sglang", config)
    plan.keys.update({name: f"--{key.replace('_', '-')}" for name, key in plan.keys.items()})
    _put_model(plan, setting(config, "hf_checkpoint"), "--hf-checkpoint")
    return plan


def _put_model(plan: EnginePlan, model: Any, key: str) -> None:
    if is_there(model) and isinstance(model, str):
        plan.put("model_path" if plan.engine == "sglang" else "model", model, key)


_READERS: dict[Framework, Callable[[Any], EnginePlan]] = {
    "verl": _of_verl,
    "ROLL": _of_roll,
    "ms-swift": _with_vllm,
    "TRL": _with_vllm,
    "slime": _of_slime,
}
