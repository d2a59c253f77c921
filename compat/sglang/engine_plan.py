"""Chooses the arguments with which SGLang returns routes, and those of each request, by release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from npu_replay.compat.sglang.releases import CLASHES, EAGLE, FAULTS, HONOURS_START, NEWEST
from npu_replay.errors import ReplayError
from npu_replay.rollout import engine_plan
from npu_replay.rollout.engine_plan import EngineArguments, number
from npu_replay.rollout.model_config import RoutedModel, is_there
from npu_replay.rollout.release_rules import EnginePlan, release


def engine_arguments(
    version: str,
    *,
    planned: EnginePlan | None = None,
    device: Literal["cuda", "npu"] = "cuda",
    model: Any = None,
) -> EngineArguments:
    """Return the arguments with which SGLang returns routes, or refuse a plan with which it won't.

    >>> from npu_replay.compat.sglang import engine_arguments
    >>> engine_arguments("0.5.23", planned={"tp_size": 8}).command_line()
    ['--tp-size', '8', '--enable-return-routed-experts']

    Args:
        version: of the engine, «0.5.12.post1».
        planned: the other arguments of the server, as ServerArgs names them.
        device: what it runs on.
        model: as `from_sglang` takes it; `model_path` of the plan, if that is a folder here.

    Returns:
        `planned`, with the switch of the routes, and with one draft per step where EAGLE would choose by
        itself. Each request must ask for routes too: `request_arguments`.

    Raises:
        ReplayError: a release without routes, or before 0.5.8, which isn't checked; a plan under which they
            would be wrong or missing, another device, or a model without routes that can be read.
    """
    plan = engine_plan.read_plan(planned or {}, {}, SHORT)
    ReplayError.unless(
        device in ("cuda", "npu"), "unknown device", where="device", expected="cuda, npu", got=repr(device)
    )
    device = "npu" if plan.get("device") == "npu" else device
    _refuse_release(version, device)
    if is_there(known := plan.get("model_path") if model is None else model):
        RoutedModel.of(known)
    engine_plan.refuse(clash(version, device, plan))
    engine_plan.warn_of_later("SGLang", version, NEWEST)
    turned_on = {**plan, **_one_draft_a_step(plan), "enable_return_routed_experts": True}
    return EngineArguments(turned_on, negates=False)


def request_arguments(version: str, *, start_len: int = 0) -> dict[str, Any]:
    """Return what each request to this release must carry, beside its prompt.

    >>> from npu_replay.compat.sglang import request_arguments
    >>> request_arguments("0.5.23", start_len=9)
    {'return_routed_experts': True, 'routed_experts_start_len': 9}

    Args:
        version: of the engine.
        start_len: the first row that is wanted, at most the prompt's tokens. A release before 0.5.12 sends
            all rows, and from_sglang leaves the earlier ones out.

    Raises:
        ReplayError: a release without routes, or that isn't checked, or a negative start.
    """
    _refuse_release(version, "cuda")
    ReplayError.unless(start_len >= 0, "routes can't start before the prompt", "0 or more", start_len)
    honoured = start_len > 0 and release(version) >= release(HONOURS_START)
    return {"return_routed_experts": True, **({"routed_experts_start_len": start_len} if honoured else {})}


def refusal(version: str, device: str) -> ReplayError | None:
    """Return why that release returns no routes on this device; None if it does."""
    return engine_plan.refusal("SGLang", version, device, FAULTS)


def clash(
    version: str, device: str, plan: EnginePlan, keys: Mapping[str, str] | None = None
) -> ReplayError | None:
    """Return why that release gives no routes, or wrong ones, with this plan; None if it gives them.

    `keys` has a framework's names of the arguments, for the message.
    """
    return engine_plan.clash("SGLang", version, device, plan, engine_plan.sure(CLASHES, version), keys)


def _refuse_release(version: str, device: str) -> None:
    engine_plan.refuse_untold("SGLang", version, "version", "0.5.23", numbers=3)
    engine_plan.refuse(refusal(version, device))


SHORT = {
    "model": "model_path",
    **dict.fromkeys(("tp", "tensor_parallel_size"), "tp_size"),
    **dict.fromkeys(("pp", "pipeline_parallel_size"), "pp_size"),
    **dict.fromkeys(("dp", "data_parallel_size"), "dp_size"),
    **dict.fromkeys(("ep", "expert_parallel_size"), "ep_size"),
    "attention_context_parallel_size": "attn_cp_size",
}
"""Maps the aliases and shortened names of the command line to the arguments' names."""


def _one_draft_a_step(plan: EnginePlan) -> dict[str, Any]:
    """Return the three numbers, which EAGLE takes together, that keep it from a tree of drafts."""
    # It chooses one by itself for some models: all that 0.5.7 doesn't know; Grok, to this day.
    if str(plan.get("speculative_algorithm")).lower() not in EAGLE:
        return {}
    if plan.get("speculative_adaptive"):  # it chooses its steps by itself
        return {"speculative_eagle_topk": 1}
    drafts = plan.get("speculative_num_draft_tokens")
    steps = plan.get("speculative_num_steps")
    if steps is None:
        steps = (
            number(drafts) - 1 if number(drafts) > 1 else 3
        )  # what SGLang itself takes for one draft a step
    return {
        "speculative_eagle_topk": 1,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": number(steps) + 1 if drafts is None else drafts,
    }
