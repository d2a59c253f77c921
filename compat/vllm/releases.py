"""Holds vLLM's table of releases: the faults of its routes, and the plans that give none.

    0.18 to 0.20  shared memory, rows by KV cache slot; no pipeline parallelism, though it isn't refused
    0.21          the prompt's rows apart, MoE layers only; reverted in the next release
    0.22 to 0.30  rows through the scheduler, over HTTP too
    0.31 to 0.33  rows by KV block, with prefix caching

Read in the released source of 0.20.2, 0.21.0, 0.22.0, 0.23.0, 0.24.0, 0.26.0, 0.27.0, 0.28.0, 0.30.0, 0.31.0
and 0.33.0. Limits that change no verdict are in docs/dev/engine-limits.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from npu_replay.compat.vllm_ascend.releases import TRIMS_DRAFTS, reads_two_groups
from npu_replay.rollout.engine_plan import as_mapping, off, on, says, several
from npu_replay.rollout.model_config import is_hybrid, names_topk
from npu_replay.rollout.release_rules import Clash, EnginePlan, Fault, Releases, Symptom, older

OLDEST = "0.18.0"
"""The oldest release that is checked; answers of earlier ones are decoded by their shape."""
NEWEST = "0.33.0"
"""The newest release that was read."""
SCHEDULER = "0.22.0"
"""The first release whose scheduler passes rows on, also after a stop string and an abort."""
BY_BLOCK = "0.31.0"
"""The first release that keeps rows by KV block: with prefix caching and Model Runner V2 only."""

SWITCH = "enable_return_routed_experts"
NEEDED: tuple[tuple[Releases, dict[str, bool]], ...] = (
    (Releases(), {SWITCH: True}),
    (Releases(until=SCHEDULER), {"async_scheduling": False}),
    (Releases(since="0.21.0", until=SCHEDULER), {"enable_prefix_caching": False}),
    (Releases(since=BY_BLOCK), {"enable_prefix_caching": True}),
)
"""The arguments that make releases return routes."""

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""The variable that turns Model Runner V2 on, for releases that need it."""

_ANOTHER = "the config given here is another model's"
_RETOKENISED = "token ids of another sequence: text that was tokenised again, or turns that were put together"
_DRAFTS = (("", "0.21.0"), (SCHEDULER, "0.26.0"))
"""Runs of releases in which a draft's MoE layer takes layer 0 and overwrites the model's (vllm#48622)."""

# fmt: off
# ---- faults; of several that fit, the likeliest first

DROPPED_AT_STOP_STRING = Fault(
    symptom=Symptom.MISSING, until=SCHEDULER, only=("stop string",),
    cause="a stop string ended it, and before 0.22.0 the scheduler, which looks routes up, doesn't know of "
    'those. Use stop_token_ids, take 0.22.0 or later, or pass missing="native" to leave such a completion '
    "without routes")

FAULTS = (
    older(OLDEST, "vLLM 0.18.0 and later, best 0.22.0 and later"),
    DROPPED_AT_STOP_STRING,
    Fault(Symptom.MISSING, until="0.21.0", only=("http",),
          cause="vLLM before 0.21.0 puts no routes into answers over HTTP. Use the engine in-process (LLM, "
          "AsyncLLM), or take 0.22.0 or later"),
    Fault(Symptom.MISSING, only=("alone",),
          cause="something in between that dropped them: other completions of this request have theirs"),
    Fault(Symptom.MISSING,
          cause=f"the engine was started without {SWITCH}=True (compat.vllm.engine_arguments says what to "
          "pass)"),
    Fault(Symptom.TOKENS,
          cause=f"{_RETOKENISED} (return_token_ids=true in the request puts the engine's own into the "
          "answer); or a BOS that it puts in front"),
    Fault(Symptom.ZEROS, until="0.27.0", device="cuda",
          cause="on NVIDIA, FlashInfer's monolithic MoE kernels (chosen by themselves on Blackwell, and for "
          "NVFP4) choose experts past the capture, refused from 0.27.0 on (vllm#44116)"),
    Fault(Symptom.ZEROS, until="0.30.0", device="cpu",
          always="gives zeros for every id", instead="vLLM 0.30.0 or later",
          cause="on a CPU, vLLM's MoE kernels choose experts past the capture before 0.30.0 (from 0.27.0 on "
          "it refuses to start so): take 0.30.0 or later"),
    Fault(Symptom.ZEROS, since="0.27.0",
          cause="a platform or a kernel that chooses experts past vLLM's routers: nothing is captured"),
    Fault(Symptom.ZERO_ROWS, until="0.21.0",
          cause="models with linear attention (Qwen3-Next, Qwen3.5): rows are read by the slots of the wrong "
          "KV cache group, or past their end (vllm#37118, #40692); fixed in 0.22.0"),
    Fault(Symptom.ZERO_ROWS, since="0.21.0", until=SCHEDULER,
          cause="tokens that come from the prefix cache have no rows in 0.21.0: start it with "
          "enable_prefix_caching=False, or take 0.22.0"),
    Fault(Symptom.ZERO_ROWS, since=SCHEDULER,
          cause="rows lost with prefix caching and chunked prefill together, which NeMo-RL has seen now and "
          'then: switch one of them off, or pass missing="native" to leave them without a route'),
    *(Fault(symptom, until="0.21.0",
            cause="pipeline parallelism: only the last stage's layers are captured, and it isn't refused "
            "before 0.21.0 (vllm#35623). Take pipeline_parallel_size=1")
      for symptom in (Symptom.CONSTANT_LAYER, Symptom.DUPLICATES)),
    *(Fault(symptom, since="0.21.0",
            cause="a layer that was never captured and is zeros: its router isn't one that vLLM binds, or "
            "the model's config counts another layer as MoE")
      for symptom in (Symptom.CONSTANT_LAYER, Symptom.DUPLICATES)),
    *(Fault(Symptom.DENSE_COLUMN, since=since, until=until,
            cause="layer 0: an MTP draft model's MoE layer calls itself that and writes there; fixed in "
            "0.26.0 (vllm#48622), so take the speculative method out, or another release. Another layer: "
            "the config given here counts them otherwise")
      for since, until in _DRAFTS),
    Fault(Symptom.DENSE_COLUMN, cause=f"{_ANOTHER}, or its layers were counted from 1"),
    Fault(Symptom.RANGE, since="0.21.0", until=SCHEDULER,
          cause="physical ids under EPLB: 0.21 captures after experts were mapped to their copies; fixed in "
          "0.22.0 (vllm#33013). Take enable_eplb=False"),
    Fault(Symptom.RANGE,
          cause=f"{_ANOTHER}, or somebody in between narrowed the dtype or put a sentinel in (-1)"),
    Fault(Symptom.TOO_FEW_ROWS, since="0.21.0", until=SCHEDULER,
          cause="0.21.0 keeps the prompt's rows apart, in RequestOutput.prompt_routed_experts, at the top of "
          "an answer over HTTP: pass the whole output, not one completion"),
    Fault(Symptom.TOO_FEW_ROWS,
          cause="the request was sent with routed_experts_prompt_start (pass the same here as start=); or "
          f"{_RETOKENISED}"),
    Fault(Symptom.TOO_MANY_ROWS,
          cause="start= was passed and the request hadn't routed_experts_prompt_start (/v1 endpoints know it "
          "from 0.28.0 on); tokens were taken off the end (pass output_token_ids= beside the whole output); "
          f"or {_RETOKENISED}"),
    Fault(Symptom.STALE_ROWS,
          cause="rows read from KV cache slots that another request had taken: preemption, or a connector "
          "that moves KV blocks"),
    Fault(Symptom.COLUMNS, cause=f"{_ANOTHER}, or counts its MoE layers in another way"),
    Fault(Symptom.TOPK, cause=_ANOTHER),
)
# fmt: on


# ---- rules of some rows below


def _speculation(plan: EnginePlan) -> tuple[str, str]:
    """Return the method and the draft."""
    config = as_mapping(plan.get("speculative_config"))
    return str(config.get("method") or "").lower(), str(config.get("model") or "").lower()


def _by_mtp(plan: EnginePlan, _: Any) -> bool:
    method, draft = _speculation(plan)
    # Without a method vLLM reads it off the draft: the model as its own draft means its MTP layers.
    target = str(plan.get("target") or plan.get("model")).lower()
    return "mtp" in (method or draft) or (draft == target and not method)


def _by_dspark(plan: EnginePlan, _: Any) -> bool:
    method, draft = _speculation(plan)
    return method == "dspark" or (not method and "dspark" in draft)


_SPLITTING = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "mori", "nixl_ep")
"""The all-to-all back ends with which MoE layers run sequence-parallel."""


def _splits_tokens(plan: EnginePlan, _: Any) -> bool:
    """Return whether MoE layers run sequence-parallel."""
    sizes = ("tensor_parallel_size", "data_parallel_size")
    spread = plan.get("enable_expert_parallel") is True and all(several(plan, (size,)) for size in sizes)
    return spread and plan.get("all2all_backend") in (None, *_SPLITTING)


def _disaggregated(plan: EnginePlan, _: Any) -> bool:
    names = _connectors(plan.get("kv_transfer_config"))
    return any(name.startswith(("Nixl", "MoRIIO")) or name == "MooncakeConnector" for name in names)


def _connectors(value: Any) -> Iterator[str]:
    """Yield the names of the KV connectors in a kv_transfer_config, those within a MultiConnector too."""
    config = as_mapping(value)
    yield str(config.get("kv_connector") or "")
    inner = as_mapping(config.get("kv_connector_extra_config")).get("connectors")
    for connector in inner if isinstance(inner, (list, tuple)) else ():
        yield from _connectors(connector)


# fmt: off
# ---- plans with which releases give no routes

_REFUSED = "vLLM refuses it when it starts"

CLASHES = (
    Clash((SWITCH,), off, instead="True, or nothing", why="it is the switch itself"),
    Clash(("aux_output_config",), lambda plan, names: as_mapping(plan.get(names[0])).get(SWITCH) is False,
          instead="True in it, or nothing", why="it is the switch itself, as vLLM 0.31.0 and later have it"),
    Clash(("pipeline_parallel_size",), several, instead="1: no release captures over pipeline stages",
          why="only the last stage's layers would be captured (vllm#35623); from 0.21.0 on vLLM refuses it"),
    Clash(("decode_context_parallel_size", "prefill_context_parallel_size"), several, why=_REFUSED,
          instead="1: no release captures under context parallelism"),
    *(Clash((name,), when, until="0.33.0", instead=f"{value}, or vLLM 0.33.0 or later",
            why="two half batches run at once, and both write their rows from the first on (vllm#50738, "
            "#54591): the first half's are lost, and behind them are an earlier step's")
      for name, when, value in (("enable_dbo", on, False), ("ubatch_size", several, 0))),
    Clash(("enable_eplb",), on, since="0.21.0", until=SCHEDULER,
          instead="False, or vLLM 0.18.0 to 0.20.2, or 0.22.0 or later",
          why="ids are captured after experts were mapped to their copies: they are physical (vllm#33013)"),
    Clash(("data_parallel_size",), until="0.20.0", mended=True,
          when=lambda plan, names: several(plan, names) and plan.get("enable_expert_parallel") is True,
          instead="1, enable_expert_parallel=False, or vLLM 0.20.0 or later",
          why="an assertion fails in the first step where each rank routes its own tokens (modular kernels)"),
    Clash(("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "all2all_backend"),
          _splits_tokens, since="0.20.0", until=SCHEDULER, mended=True,
          instead="tensor or data parallelism alone, expert parallelism off, or vLLM 0.22.0 or later",
          why="tokens are split over tensor-parallel ranks before they are routed, and an assertion of the "
          "capture fails in the first step; 0.21.0 refuses it"),
    Clash(("nnodes",), several, until="0.21.0", instead="1, or vLLM 0.22.0 or later",
          why="rows go through shared memory of one host"),
    Clash(("kv_transfer_config", "kv_offloading_size"), on, until=BY_BLOCK,
          instead="no KV connector, or one that offloads with vLLM 0.31.0 or later",
          why="tokens whose KV blocks come back from outside have no rows; from 0.22.0 on vLLM refuses it"),
    Clash(("kv_transfer_config",), _disaggregated, since=BY_BLOCK,
          instead="connectors that offload; prefill and decode in one engine",
          why="vLLM refuses those of Nixl, MoRIIO and Mooncake when it starts: rows don't travel with KV "
          "blocks"),
    Clash(("async_scheduling",), on, until=SCHEDULER,
          instead="False, or vLLM 0.22.0 or later",
          why="rows are read from places that the next step may have taken; 0.21.0 refuses it at its start"),
    Clash(("enable_prefix_caching",), on, since="0.21.0", until=SCHEDULER,
          instead="False, or vLLM 0.22.0 or later", why="tokens that come from the cache have rows of zeros"),
    Clash(("enable_prefix_caching",), off, since=BY_BLOCK, instead="True, or vLLM 0.22.0 to 0.30.0",
          why="rows are kept by KV block from 0.31.0 on, and vLLM refuses to start without"),
    *(Clash(("speculative_config",), _by_mtp, since=since, until=until, mended=True,
            instead="another method, or vLLM 0.26.0 or later",
            why="the draft's MoE layer calls itself layer 0 and overwrites the model's (vllm#48622)")
      for since, until in _DRAFTS),
    Clash(("speculative_config",), _by_dspark, since="0.25.0", until="0.28.0",
          instead="another method, or vLLM 0.28.0 or later",
          why="DSpark runs on Model Runner V2 alone, without a capture before 0.28.0: vLLM refuses it when "
          "it starts"),
    *TRIMS_DRAFTS,
    Clash(("moe_backend",), says("flashinfer_trtllm"), until="0.27.0",
          instead='"triton" or another, or vLLM 0.27.0 or later',
          why="the kernel chooses experts by itself, past the capture, and every id is 0 (vllm#44116)"),
    Clash(("runner",), lambda plan, _: plan.get("runner") not in (None, "auto", "generate"),
          instead='"generate"', why="only generation has routes"),
    Clash(("model",), lambda plan, _: is_hybrid(plan.get("model")), until="0.21.0", got="a hybrid model",
          problem="reads the rows of a model with linear attention from the wrong place",
          instead="vLLM 0.22.0 or later",
          why="it has several KV cache groups, whose slots are counted otherwise (vllm#37118, #40692)"),
    Clash(("model", "disable_hybrid_kv_cache_manager"), reads_two_groups, until="0.21.0",
          got="a model with layers of a window beside others",
          problem="reads the rows of a model with two kinds of attention from the wrong place",
          instead="disable_hybrid_kv_cache_manager=True, or vLLM 0.22.0 or later",
          why="rows lie by the slots of one KV cache group, whose old blocks are given away"),
    Clash(("model",), lambda plan, _: not names_topk(plan.get("model")), until=SCHEDULER,
          got="a config without num_experts_per_tok", problem="doesn't find this model's top-k",
          instead="vLLM 0.22.0 or later",
          why="a family with another key (Gemma 4: top_k_experts, vllm#41401), with which it doesn't start"),
)
# fmt: on


def schedules_step_by_step(plan: EnginePlan) -> bool:
    """Return whether vLLM turns asynchronous scheduling off by itself, if the plan doesn't ask for it."""
    drafts = as_mapping(plan.get("speculative_config"))
    method = str(drafts.get("method") or "")
    ahead = not method or any(word in method for word in ("eagle", "mtp", "ngram_gpu", "hidden_states"))
    executor = plan.get("distributed_executor_backend")
    return not ahead or bool(drafts.get("disable_padded_drafter_batch")) or executor == "ray"


def needs_sync(version: str) -> bool:
    """Return whether rows are right with async_scheduling=False only."""
    return any(run.holds(version) and "async_scheduling" in some for run, some in NEEDED)
