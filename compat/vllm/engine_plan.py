"""Chooses the arguments with which vLLM returns routes, by release, and refuses a plan that returns none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_replay.compat.probe import Capability, Product, unusable
from npu_replay.compat.vllm.releases import BY_BLOCK, CLASHES, FAULTS, NEEDED, NEWEST, SWITCH, V2
from npu_replay.compat.vllm_ascend import releases as ascend
from npu_replay.errors import ReplayError
from npu_replay.rollout import engine_plan
from npu_replay.rollout.engine_plan import EngineArguments, Kind, unreadable
from npu_replay.rollout.model_config import RoutedModel, is_there
from npu_replay.rollout.release_rules import release, tells_release

CAPABILITY = "routes of vLLM"


def engine_arguments(
    version: str,
    *,
    planned: Mapping[str, Any] | None = None,
    model: Any = None,
    quantization: str | None = None,
    vllm_ascend: str | None = None,
    soc: str | None = None,
    capture: bool = False,
) -> EngineArguments:
    """Return the arguments with which vLLM returns routes, or refuse a plan with which it won't.

    >>> from npu_replay.compat.vllm import engine_arguments
    >>> planned = {"tensor_parallel_size": 4}
    >>> engine_arguments("0.33.0", planned=planned).command_line()  # doctest: +NORMALIZE_WHITESPACE
    ['--tensor-parallel-size', '4', '--enable-return-routed-experts', '--enable-prefix-caching']

    Args:
        version: vLLM's release, "0.23.0".
        planned: the planned arguments, by their Python names; `model` and `quantization` are read there too.
        model: a RoutedModel, or a Hugging Face config: its path or its folder's, its contents, an object.
        quantization: the quantization of the rollout's weights, if any.
        vllm_ascend: vllm-ascend's release, if it runs on that; a build between releases counts as vLLM's.
        soc: the processor's generation, if it runs on vllm-ascend: "A2", "A3", "A5", "310P", or its chip
            ("910B", "910C", "950").
        capture: npu_replay's plug-in captures on vllm-ascend, which restores what its releases lose.

    Returns:
        The planned arguments with those that turn routes on, and the environment they need.

    Raises:
        ReplayError: the error names the argument, the release from which it works, and what happens
            otherwise; or a release before 0.18.0, which isn't checked.
    """
    plan_read = engine_plan.read_plan(planned or {}, KINDS, SHORT)
    known = model if model is not None else plan_read.get("model")
    plan = {**plan_read, "model": known if is_there(known) else None, "target": plan_read.get("model")}
    engine_plan.refuse_untold("vLLM", version, "version", "0.23.0")
    if isinstance(vllm_ascend, str):
        vllm_ascend = ascend.of_release(vllm_ascend, version)
    if vllm_ascend:
        engine_plan.refuse_untold("vllm-ascend", vllm_ascend, "vllm_ascend", "0.23.0")
    if capture and not vllm_ascend:
        raise unreadable("capture", "vllm_ascend= beside it: npu_replay captures there alone", "capture=True")
    engine_plan.refuse(refusal(version, vllm_ascend or ""))
    if plan["model"] is not None:
        RoutedModel.of(plan["model"])
    about = {
        **plan,
        "quantization": quantization or plan_read.get("quantization"),
        "soc": None if soc is None else ascend.soc_of(soc),
    }
    engine_plan.refuse(clash(version, about, vllm_ascend or "", capture=capture))
    engine_plan.warn_of_later("vLLM", version, NEWEST)
    needed = {name: value for run, some in NEEDED if run.holds(version) for name, value in some.items()}
    environment = dict(V2) if release(version) >= release(BY_BLOCK) else {}
    if vllm_ascend:
        environment |= V2 if ascend.needs_v2(vllm_ascend, plan["model"]) else {}
        environment |= ascend.environment() if capture else {}
        if ascend.needs_sync(vllm_ascend):
            needed["async_scheduling"] = False
    added = {name: value for name, value in needed.items() if plan_read.get(name) is None}
    return EngineArguments({**plan_read, **added}, environment)


def clash(
    version: str,
    plan: Mapping[str, Any],
    vllm_ascend: str = "",
    *,
    capture: bool = False,
    keys: Mapping[str, str] | None = None,
) -> ReplayError | None:
    """Return why that release gives no routes, or wrong ones, with this plan; None if it gives them.

    Args:
        version: vLLM's release; empty if only vllm-ascend's is known.
        plan: the arguments, with `soc` beside them on vllm-ascend.
        keys: a framework's names of the arguments, for the words.
    """
    rows = [row for row in CLASHES if not (capture and row.mended)] if version else []
    error = engine_plan.clash("vLLM", version, "", plan, engine_plan.sure(rows, version), keys)
    if error is not None or not vllm_ascend:
        return error
    if release(version) >= release(BY_BLOCK) > release(vllm_ascend):
        return ReplayError(
            f"vllm-ascend {vllm_ascend} captures no routes beside vLLM {version}",
            where="rollout",
            expected="vLLM 0.30.0 with vllm-ascend 0.30.0, or a vllm-ascend of vLLM's own release",
            got=f"vLLM {version}",
            cause="routes went to the AuxOutput connector in 0.31.0, so nothing is captured",
        )
    return ascend.refusal(vllm_ascend, plan, version, capture=capture, keys=keys)


def capability(product: Product, plugin: Product | None = None) -> Capability:
    """Return whether vLLM's rollouts have routes, as far as the release tells."""
    if not product.usable:
        return unusable(CAPABILITY, product)
    if not tells_release(product.version):
        return Capability(CAPABILITY, "works", "but its release isn't known, and some give zeros")
    problem = refusal(product.version, plugin.version if plugin is not None and plugin.usable else "")
    if problem is not None:
        why = f"{problem.problem}: {problem.cause}"
        return Capability(CAPABILITY, "broken", why, f"take {problem.expected}")
    return Capability(CAPABILITY, "works", f"with {SWITCH}=True; no pipeline and context parallelism")


def device_of(version: str, vllm_ascend: str) -> str:
    """Return the device that the releases imply: «npu», «cpu», or nothing."""
    return "npu" if vllm_ascend else "cpu" if "+cpu" in version else ""


def refusal(version: str, vllm_ascend: str = "") -> ReplayError | None:
    """Return why that release gives no routes; None if it gives them, or is unknown."""
    if not tells_release(version):
        return None
    return engine_plan.refusal("vLLM", version, device_of(version, vllm_ascend) or "cuda", FAULTS)


SHORT = {
    "pp": "pipeline_parallel_size",
    "tp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "ep": "enable_expert_parallel",
    "n": "nnodes",
    "q": "quantization",
    "sc": "speculative_config",
}
"""Maps its short options, «-pp», to the arguments' names."""
KINDS: dict[str, Kind] = {
    **dict.fromkeys((SWITCH, "enable_eplb", "enable_expert_parallel", "enable_prefix_caching"), "flag"),
    **dict.fromkeys(("async_scheduling", "enable_dbo", "enforce_eager"), "flag"),
    **dict.fromkeys(("pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"), "count"),
    **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"), "count"),
    **dict.fromkeys(
        ("kv_transfer_config", "speculative_config", "additional_config", "aux_output_config"), "keys"
    ),
    "kv_offloading_size": "number",
    "ubatch_size": "count",
}
