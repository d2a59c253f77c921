"""What to start vLLM with so that it returns routes, and what it can't be started with then, by release.

A rollout that can't return routes is refused before it is paid for: by the argument, with the release from
which it works. Read in the released source (see `vllm_releases`). Nothing of vLLM is imported or changed.

Probes: `capability`. Offers: `engine_arguments`, `CLASHES`. Nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from npu_replay.compat import vllm_ascend as ascend
from npu_replay.compat.probe import Capability, Product
from npu_replay.compat.vllm import faults as releases
from npu_replay.compat.vllm.faults import (
    BY_BLOCK,
    CPU,
    DRAFTS_OVERWRITE,
    HTTP,
    HYBRIDS,
    MEMORY_BY_RANK,
    NEWEST,
    PHYSICAL,
    REFUSES_KERNELS,
    REFUSES_STAGES,
    SCALE_OUT,
    SCHEDULER,
    SWITCH,
)
from npu_replay.compat.vllm.planned import as_mapping, count, read
from npu_replay.errors import ReplayError
from npu_replay.rollout import engine_config
from npu_replay.rollout.launch import EngineArguments, Limit, limits_of
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.releases import Releases, release, tells_release

CAPABILITY = "routes of vLLM"
_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def engine_arguments(
    version: str,
    *,
    planned: Mapping[str, Any] | None = None,
    model: Any = None,
    quantization: str | None = None,
    vllm_ascend: str | None = None,
    soc: ascend.Soc | None = None,
) -> EngineArguments:
    """What to start vLLM with so that it returns routes, refused before anything starts where it won't.

    Args:
        version: vLLM's release, "0.23.0".
        planned: the arguments that the rollout is planned with, by their Python names or as on a command
            line ("--enable-eplb", "no_enable_eplb": True, "-pp": "2"); `model` and `quantization` are found
            there too.
        model: a RoutedModel, or a Hugging Face config: its path or its folder's, its contents, an object.
        quantization: how the rollout's weights are quantized, if they are.
        vllm_ascend: vllm-ascend's release, if it runs on that.
        soc: the processor's generation, if it runs on that.

    Returns:
        The planned arguments with those that turn routes on, the environment they need, and what this
        release can't do, in words.

    Raises:
        ReplayError: names the argument, the release from which it works, and what happens else.
    """
    given = read(planned or {})
    known = model if model is not None else given.get("model")
    setting = ascend.Setting(
        model=known if engine_config.is_there(known) else None,
        quantization=quantization or given.get("quantization"),
        data_parallel=count(given.get("data_parallel_size")),
        tensor_parallel=count(given.get("tensor_parallel_size")),
        expert_parallel=bool(given.get("enable_expert_parallel")),
        soc=soc,
        async_scheduling=given.get("async_scheduling"),
    )
    _refuse_release(version, vllm_ascend)
    _refuse_clashes(version, given)
    if setting.model is not None:
        _refuse_model(version, setting.model)
    environment = dict(_V2) if release(version) >= release(BY_BLOCK) else {}
    said = limits(version, given, releases.device_of(version, vllm_ascend or ""))
    if vllm_ascend:
        _refuse_pair(version, vllm_ascend)
        ascend.check(vllm_ascend, setting)
        environment |= _V2 if ascend.needs_v2(vllm_ascend, setting) else {}
        said += (*_unlike(version, vllm_ascend), *ascend.limits(vllm_ascend, setting))
    needed = switched_on(version)
    if vllm_ascend and ascend.needs_sync(vllm_ascend):
        needed["async_scheduling"] = False
    added = {name: value for name, value in needed.items() if given.get(name) is None}
    return EngineArguments({**given, **added}, said, environment)


def capability(product: Product, plugin: Product | None = None) -> Capability:
    """Routes of vLLM's rollouts, as far as its release tells.

    Args:
        product: what is found of vLLM.
        plugin: what is found of vllm-ascend.
    """
    if not product.usable:
        state: Literal["broken", "missing"] = "broken" if product.problem else "missing"
        return Capability(CAPABILITY, state, product.problem or "vllm is not installed")
    if not tells_release(product.version):
        return Capability(CAPABILITY, "works", "but its release isn't known, and some give zeros")
    try:
        _refuse_release(product.version, plugin.version if plugin is not None and plugin.usable else None)
    except ReplayError as problem:
        return Capability(
            CAPABILITY, "broken", f"{problem.problem}: {problem.cause}", f"take {problem.expected}"
        )
    return Capability(CAPABILITY, "works", f"with {SWITCH}=True; no pipeline and context parallelism")


def _refuse_release(version: str, vllm_ascend: str | None) -> None:
    _refuse_untold("vLLM", version, "version")
    if vllm_ascend:
        _refuse_untold("vllm-ascend", vllm_ascend, "vllm_ascend")
    problem = releases.refusal(version, vllm_ascend or "")
    if problem is not None:
        raise problem


def _refuse_untold(product: str, version: Any, parameter: str) -> None:
    if not tells_release(version):
        raise ReplayError(
            "this version doesn't tell its release",
            where=f"rollout, {product}",
            expected=f'the release that it is nearest to: pass {parameter}="0.23.0", say',
            got=repr(version),
            cause="a nightly build, or one from a clone without tags",
        )


def _refuse_clashes(version: str, given: Mapping[str, Any]) -> None:
    for clash in CLASHES:
        if clash.holds(version) and clash.clashes(given.get(clash.argument), given):
            raise ReplayError(
                f"vLLM {version} gives no routes, or wrong ones, with this {clash.argument}",
                where="rollout",
                expected=f"{clash.argument}: {clash.instead}",
                got=repr(given[clash.argument]),
                cause=clash.why,
            )


def _refuse_model(version: str, model: Any) -> None:
    try:
        RoutedModel.of(model)
    except ReplayError as error:
        raise ReplayError(
            f"vLLM {version} gives no routes of this model",
            where="rollout",
            expected="a model with routed experts",
            got=error.problem,
            cause="a dense model, with which vLLM doesn't start (before 0.31.0 with an AttributeError, "
            "vllm#42593); or a family whose config has other keys, which RoutedModel(...) says by hand",
        ) from error
    at = release(version)
    if at < release(HYBRIDS) and engine_config.is_hybrid(model):
        raise ReplayError(
            f"vLLM {version} reads the rows of a model with linear attention from the wrong place",
            where="rollout",
            expected="vLLM 0.22.0 or later",
            got="a hybrid model",
            cause="it has several KV cache groups, whose slots are counted otherwise (vllm#37118, #40692)",
        )
    if at < release(SCHEDULER) and not engine_config.names_topk(model):
        raise ReplayError(
            f"vLLM {version} doesn't find this model's top-k",
            where="rollout",
            expected="vLLM 0.22.0 or later",
            got="a config without num_experts_per_tok",
            cause="a family with another key (Gemma 4: top_k_experts, vllm#41401), with which it doesn't "
            "start",
        )


def _refuse_pair(version: str, vllm_ascend: str) -> None:
    if release(version) >= release(BY_BLOCK) > release(vllm_ascend):
        raise ReplayError(
            f"vllm-ascend {vllm_ascend} has no part in the way that vLLM {version} takes with routes",
            where="rollout",
            expected="vLLM 0.30.0 with vllm-ascend 0.30.0rc2, or a vllm-ascend of vLLM's own release",
            got=f"vLLM {version}",
            cause="routes went to the AuxOutput connector in 0.31.0: the switch is looked for where it no "
            "longer is, and nothing is captured",
        )


def _unlike(version: str, vllm_ascend: str) -> tuple[str, ...]:
    if release(version)[:2] == release(vllm_ascend)[:2]:
        return ()
    return (f"vllm-ascend {vllm_ascend} is made for vLLM {'.'.join(map(str, release(vllm_ascend)[:2]))}",)


# ---- arguments with which a release gives none


@dataclass(frozen=True, kw_only=True)
class Clash(Releases):
    """A planned argument with which releases return no routes, or wrong ones.

    Attributes:
        argument: its name, as `LLM(...)` takes it.
        clashes: does it, with this value, among these others?
        instead: what to pass instead, or which release to take.
        why: what happens else.
    """

    argument: str
    clashes: Callable[[Any, Mapping[str, Any]], bool]
    instead: str
    why: str


def _several(value: Any, _: Mapping[str, Any]) -> bool:
    return count(value) > 1


def _on(value: Any, _: Mapping[str, Any]) -> bool:
    return value is True


def _off(value: Any, _: Mapping[str, Any]) -> bool:
    return value is False


def _given(value: Any, _: Mapping[str, Any]) -> bool:
    return bool(value)


def _disaggregates(value: Any, _: Mapping[str, Any]) -> bool:
    return any(
        name.startswith(("Nixl", "MoRIIO")) or name == "MooncakeConnector" for name in _connectors(value)
    )


def _connectors(value: Any) -> Iterator[str]:
    """The names of the KV connectors in a kv_transfer_config, those within a MultiConnector too."""
    config = as_mapping(value)
    yield str(config.get("kv_connector") or "")
    inner = as_mapping(config.get("kv_connector_extra_config")).get("connectors")
    for one in inner if isinstance(inner, (list, tuple)) else ():
        yield from _connectors(one)


def _drafts_by_mtp(value: Any, _: Mapping[str, Any]) -> bool:
    return "mtp" in str(as_mapping(value).get("method") or "").lower()


def _drafts_by_dspark(value: Any, _: Mapping[str, Any]) -> bool:
    config = as_mapping(value)
    method, draft = (str(config.get(key) or "").lower() for key in ("method", "model"))
    return method == "dspark" or (not method and "dspark" in draft)


def _verifies_adaptively(value: Any, _: Mapping[str, Any]) -> bool:
    return bool(as_mapping(value).get("enable_adaptive_verification"))


def _several_with_experts_spread(value: Any, planned: Mapping[str, Any]) -> bool:
    return _several(value, planned) and planned.get("enable_expert_parallel") is True


def _isnt_generate(value: Any, _: Mapping[str, Any]) -> bool:
    return value is not None and value not in ("auto", "generate")


def _is_monolithic(value: Any, _: Mapping[str, Any]) -> bool:
    return str(value).replace("-", "_") == "flashinfer_trtllm"


CLASHES = (
    Clash(
        argument=SWITCH,
        clashes=_off,
        instead="True, or nothing",
        why="it is the switch itself",
    ),
    Clash(
        argument="pipeline_parallel_size",
        clashes=_several,
        until=REFUSES_STAGES,
        instead="1: no release captures over pipeline stages",
        why="only the last stage's layers are captured, the others are zeros, and it isn't refused "
        "(vllm#35623)",
    ),
    Clash(
        argument="pipeline_parallel_size",
        clashes=_several,
        since=REFUSES_STAGES,
        instead="1: no release captures over pipeline stages",
        why="vLLM refuses it when it starts",
    ),
    *(
        Clash(
            argument=argument,
            clashes=_several,
            instead="1: no release captures under context parallelism",
            why="vLLM refuses it when it starts",
        )
        for argument in ("decode_context_parallel_size", "prefill_context_parallel_size")
    ),
    *(
        Clash(
            argument="enable_eplb",
            clashes=_on,
            since=run.since,
            until=run.until,
            instead=f"False, or vLLM 0.16.0 to 0.20.2, or {SCHEDULER} or later",
            why="ids are captured after experts were mapped to their copies: they are physical (vllm#33013)",
        )
        for run in PHYSICAL
    ),
    Clash(
        argument="data_parallel_size",
        clashes=_several,
        until=MEMORY_BY_RANK,
        instead="1, or vLLM 0.16.0 or later (best 0.22.0 and later)",
        why="the shared memory that rows go through has one name for all data-parallel ranks",
    ),
    Clash(
        argument="data_parallel_size",
        clashes=_several_with_experts_spread,
        since=MEMORY_BY_RANK,
        until="0.20.0",
        instead="1, enable_expert_parallel=False, or vLLM 0.20.0 or later",
        why="an assertion fails in the first step where each rank routes its own tokens (modular kernels)",
    ),
    Clash(
        argument="nnodes",
        clashes=_several,
        until="0.21.0",
        instead="1, or vLLM 0.22.0 or later",
        why="rows go through shared memory of one host",
    ),
    Clash(
        argument="kv_transfer_config",
        clashes=_given,
        until=SCHEDULER,
        instead="no KV connector, or one that offloads with vLLM 0.31.0 or later",
        why="tokens whose KV blocks come from outside have no rows, and it isn't refused",
    ),
    Clash(
        argument="kv_transfer_config",
        clashes=_given,
        since=SCHEDULER,
        until=BY_BLOCK,
        instead="no KV connector, or one that offloads with vLLM 0.31.0 or later",
        why="vLLM refuses it when it starts",
    ),
    Clash(
        argument="kv_transfer_config",
        clashes=_disaggregates,
        since=BY_BLOCK,
        instead="connectors that offload; prefill and decode in one engine",
        why="vLLM refuses those of Nixl, MoRIIO and Mooncake when it starts: rows don't travel with KV "
        "blocks",
    ),
    Clash(
        argument="kv_offloading_size",
        clashes=_given,
        until=BY_BLOCK,
        instead="nothing, or vLLM 0.31.0 or later",
        why="it is a KV connector: tokens whose KV blocks come back from outside have no rows",
    ),
    Clash(
        argument="async_scheduling",
        clashes=_on,
        since="0.21.0",
        until=SCHEDULER,
        instead="False, or vLLM 0.22.0 or later",
        why="vLLM refuses it when it starts",
    ),
    Clash(
        argument="enable_prefix_caching",
        clashes=_on,
        since="0.21.0",
        until=SCHEDULER,
        instead="False, or vLLM 0.22.0 or later",
        why="tokens that come from the cache have rows of zeros",
    ),
    Clash(
        argument="enable_prefix_caching",
        clashes=_off,
        since=BY_BLOCK,
        instead="True, or vLLM 0.22.0 to 0.30.0",
        why="rows are kept by KV block from 0.31.0 on, and vLLM refuses to start without",
    ),
    *(
        Clash(
            argument="speculative_config",
            clashes=_drafts_by_mtp,
            since=run.since,
            until=run.until,
            instead="another method, or vLLM 0.26.0 or later",
            why="the draft's MoE layer calls itself layer 0 and overwrites the model's (vllm#48622)",
        )
        for run in DRAFTS_OVERWRITE
    ),
    Clash(
        argument="speculative_config",
        clashes=_drafts_by_dspark,
        since="0.25.0",
        until="0.28.0",
        instead="another method, or vLLM 0.28.0 or later",
        why="DSpark runs on Model Runner V2 alone, without a capture before 0.28.0: vLLM refuses it when it "
        "starts",
    ),
    Clash(
        argument="speculative_config",
        clashes=_verifies_adaptively,
        since=BY_BLOCK,
        instead="enable_adaptive_verification=False",
        why="vLLM refuses it when it starts",
    ),
    Clash(
        argument="moe_backend",
        clashes=_is_monolithic,
        until=REFUSES_KERNELS,
        instead='"triton" or another, or vLLM 0.27.0 or later',
        why="the kernel chooses experts by itself, past the capture, and every id is 0 (vllm#44116)",
    ),
    Clash(
        argument="runner",
        clashes=_isnt_generate,
        instead='"generate"',
        why="only generation has routes",
    ),
)


def switched_on(version: str) -> dict[str, Any]:
    """The arguments that make that release return routes."""
    found: dict[str, Any] = {SWITCH: True}
    at = release(version)
    if at < release(SCHEDULER):
        found["async_scheduling"] = False
    if release("0.21.0") <= at < release(SCHEDULER):
        found["enable_prefix_caching"] = False
    if at >= release(BY_BLOCK):
        found["enable_prefix_caching"] = True
    return found


LIMITS = (
    Limit(
        until=SCHEDULER,
        words="a completion that a stop string ends has no routes before 0.22.0 (stop_token_ids are fine)",
    ),
    Limit(until=SCHEDULER, words="an aborted request has no routes before 0.22.0"),
    Limit(until=HTTP, words=f"there are no routes over HTTP before {HTTP}"),
    Limit(
        until="0.21.0",
        words="rows go through shared memory of one host, as large as the KV cache has slots, times "
        "layers and top-k: see that /dev/shm has room",
    ),
    Limit(
        until="0.21.0",
        words="async_scheduling=False is passed: with it, rows are read from slots that may have been "
        "given away",
    ),
    Limit(
        since="0.21.0",
        until=SCHEDULER,
        words="0.21.0 drops the routes of preempted requests, and takes no sequence parallelism, and no "
        "data parallelism without modular kernels",
    ),
    Limit(
        until=REFUSES_KERNELS,
        device="cuda",
        words="FlashInfer's monolithic MoE kernels, which vLLM takes by itself on Blackwell and for NVFP4, "
        f"give zeros before {REFUSES_KERNELS} (vllm#44116): pass moe_backend='triton' or another there",
    ),
    Limit(
        until="0.28.0",
        device="cuda",
        words="Model Runner V2 captures nothing before 0.28.0: vLLM falls back to V1, or refuses to start "
        "where VLLM_USE_V2_MODEL_RUNNER=1 asks for V2, so leave it unset",
    ),
    Limit(
        until="0.17.0",
        device="cuda",
        words="rows are captured on CUDA devices alone before 0.17.0",
    ),
    Limit(
        until=CPU,
        device="cpu",
        words=f"on a CPU every id is 0 before {CPU}, and from {REFUSES_KERNELS} on vLLM refuses to start",
    ),
    Limit(
        since=SCALE_OUT,
        words="/inference/v1/generate is served with --enable-scale-out alone (or --tokens-only) from "
        f"{SCALE_OUT} on",
    ),
    Limit(
        since=BY_BLOCK,
        words="Model Runner V2 needs Triton: without it, as on most CPUs, vLLM refuses to start («Model "
        "Runner V2 requires Triton»), so take an earlier release there",
    ),
    Limit(
        until=SCHEDULER,
        words="sequence parallelism of MoE layers ends in an AssertionError before 0.22.0, or is refused",
    ),
    Limit(
        since=SCHEDULER,
        until=BY_BLOCK,
        words="the scheduler keeps rows of every KV cache slot in host memory: slots times layers times "
        "top-k bytes",
    ),
    Limit(
        since=SCHEDULER,
        until=BY_BLOCK,
        words="a routed_experts_prompt_start that isn't below the prompt's length ends the engine "
        "before 0.31.0",
    ),
    Limit(
        until=BY_BLOCK,
        words="outputs that are merged while they wait in a stream lose their routes before 0.31.0: use "
        "RequestOutputKind.FINAL_ONLY",
    ),
    Limit(
        since=SCHEDULER,
        words="tokens from the prefix cache have the rows of whoever computed them first: reset it when "
        "weights change",
    ),
    Limit(
        since=BY_BLOCK,
        words="rows are kept in aux_output_config's max_bytes; where that is too small, requests fail "
        "with BlockObjectStoreError",
    ),
)


def limits(version: str, planned: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """What that release can't do or does wrong, where its arguments don't tell, one sentence each."""
    found = limits_of(LIMITS, version, device)
    if release(version) > release(NEWEST):
        found.insert(
            0, f"vLLM {version} is newer than {NEWEST}, the newest that was looked at: taken for its like"
        )
    if _may_need_v2(planned, release(version)):
        found.append(
            "a DFlash draft that mixes sliding-window and full attention needs Model Runner V2, which "
            "captures nothing before 0.28.0: vLLM refuses it when it starts"
        )
    if _may_draft(planned, version):
        found.append("a draft model that has MoE layers of its own overwrites layer 0 before 0.26.0")
    return tuple(found)


def _may_need_v2(planned: Mapping[str, Any], at: tuple[int, ...]) -> bool:
    method = str(as_mapping(planned.get("speculative_config")).get("method") or "").lower()
    return method == "dflash" and release("0.26.0") <= at < release("0.28.0")


def _may_draft(planned: Mapping[str, Any], version: str) -> bool:
    config = as_mapping(planned.get("speculative_config"))
    method = str(config.get("method") or "").lower()
    without_model = ("ngram", "suffix", "medusa", "mlp_speculator")
    return (
        bool(config)
        and any(run.holds(version) for run in DRAFTS_OVERWRITE)
        and not method.startswith(without_model)
    )
