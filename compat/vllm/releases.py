"""vLLM by release: what can be wrong with its routes, which plans give none, what else holds. Rows only.

    0.14          shared memory, rows by KV cache slot; physical ids under EPLB
    0.15          the switch is there, and every id is 0
    0.16 to 0.20  logical ids; no pipeline parallelism, though it isn't refused
    0.21          the prompt's rows apart, MoE layers only; reverted in the next release
    0.22 to 0.30  rows through the scheduler, over HTTP too
    0.31 to 0.33  rows by KV block, with prefix caching

Read in the released source of 0.14.0, 0.15.1, 0.16.0, 0.20.2, 0.21.0, 0.22.0, 0.23.0, 0.24.0, 0.26.0, 0.27.0,
0.28.0, 0.30.0, 0.31.0 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from npu_replay.rollout.launch import as_mapping, off, on, says, several
from npu_replay.rollout.model_config import is_hybrid, names_topk
from npu_replay.rollout.release_rules import Clash, Fault, Limit, Plan, Releases, Symptom

FIRST = "0.14.0"
NEWEST = "0.33.0"
"""The newest release whose source was read; what comes later is taken for its like."""
SCHEDULER = "0.22.0"
"""The first release whose scheduler hands rows on: after a stop string and an abort too."""
BY_BLOCK = "0.31.0"
"""The first release that keeps rows by KV block: with prefix caching and Model Runner V2 alone."""

SWITCH = "enable_return_routed_experts"
NEEDED: tuple[tuple[Releases, dict[str, bool]], ...] = (
    (Releases(), {SWITCH: True}),
    (Releases(until=SCHEDULER), {"async_scheduling": False}),
    (Releases(since="0.21.0", until=SCHEDULER), {"enable_prefix_caching": False}),
    (Releases(since=BY_BLOCK), {"enable_prefix_caching": True}),
)
"""The arguments that make releases return routes."""

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""What the environment says where Model Runner V2 is needed."""

BEAMS = "beam search, which puts its completions together without routes in every release: sample instead"
_INSTEAD = "vLLM 0.14, or 0.16.0 and later; best 0.22.0 and later"
_ANOTHER = "the config given here is another model's"
_RETOKENISED = "token ids of another sequence: text that was tokenised again, or turns that were put together"
_DRAFTS = (("", "0.21.0"), (SCHEDULER, "0.26.0"))
"""Since and until: a draft's MoE layer calls itself layer 0 and overwrites the model's (vllm#48622)."""
_PHYSICAL = (("", "0.16.0"), ("0.21.0", SCHEDULER))
"""Since and until: ids are those of experts' copies under EPLB (vllm#33013)."""
_STREAMS = ((FIRST, "0.21.0"), (SCHEDULER, BY_BLOCK))
"""Since and until: routes come with the last output, and outputs that wait for each other are merged."""

# fmt: off
# ---- what can be wrong; of several that fit, the likeliest first

DROPPED_AT_STOP_STRING = Fault(
    symptom=Symptom.MISSING, since=FIRST, until=SCHEDULER, only=("stop string",), sure=True,
    cause="a stop string ended it, and before 0.22.0 the scheduler, which looks routes up, doesn't know of "
    'those. Use stop_token_ids, take 0.22.0 or later, or pass missing="native" to leave such a completion '
    "without routes")

FAULTS = (
    DROPPED_AT_STOP_STRING,
    Fault(Symptom.MISSING, since=FIRST, until="0.21.0", only=("http",), sure=True,
          cause="0.14 to 0.20 put no routes into answers over HTTP. Use the engine in-process (LLM, "
          "AsyncLLM), or take 0.22.0 or later"),
    Fault(Symptom.MISSING, only=("alone",),
          cause="something in between that dropped them: other completions of this request have theirs"),
    Fault(Symptom.MISSING, since=FIRST, only=("in-process", "http"),
          cause=f"the engine was started without {SWITCH}=True (compat.vllm.engine_arguments says what to "
          "pass)"),
    Fault(Symptom.MISSING, since=SCHEDULER, only=("http",),
          cause="it is vLLM's Rust front end, which never returns routes"),
    *(Fault(Symptom.MISSING, only=("in-process",), since=since, until=until,
            cause="it was read as a stream, and pieces that wait for each other are merged without the "
            "routes: fixed in 0.31.0, use RequestOutputKind.FINAL_ONLY before")
      for since, until in _STREAMS),
    Fault(Symptom.MISSING, since=FIRST, only=("in-process", "http"), cause=BEAMS),
    Fault(Symptom.MISSING, since="0.21.0", until=SCHEDULER,
          cause="the request was preempted, of which 0.21.0 drops the routes: take 0.22.0 and later"),
    Fault(Symptom.MISSING, until=FIRST, sure=True, always="has no routes", instead=_INSTEAD,
          cause="vLLM has no routes before 0.14.0. Take 0.22.0 and later"),

    Fault(Symptom.ZEROS, since="0.15.0", until="0.16.0", device="cuda", sure=True,
          always="gives zeros for every id", instead=_INSTEAD,  # vllm-ascend calls the capture by itself
          cause="0.15 never binds the capture, so every id is 0; fixed in 0.16.0 (vllm#33013)"),
    Fault(Symptom.ZEROS, until="0.27.0", device="cuda",
          cause="on NVIDIA, FlashInfer's monolithic MoE kernels (chosen by themselves on Blackwell, and for "
          "NVFP4) choose experts past the capture, refused from 0.27.0 on (vllm#44116)"),
    Fault(Symptom.ZEROS, until="0.30.0", device="cpu",
          always="gives zeros for every id", instead=_INSTEAD,
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
    Fault(Symptom.CONSTANT_LAYER, until="0.21.0",
          cause="pipeline parallelism: only the last stage's layers are captured, and it isn't refused "
          "before 0.21.0 (vllm#35623). Take pipeline_parallel_size=1"),
    Fault(Symptom.CONSTANT_LAYER,
          cause="a layer that was never captured: its router isn't one that vLLM binds, or the model's "
          "config counts another layer as MoE"),
    Fault(Symptom.DUPLICATES, until="0.21.0",
          cause="layers that were never captured and are zeros: earlier pipeline stages (vllm#35623). Take "
          "pipeline_parallel_size=1"),
    Fault(Symptom.DUPLICATES,
          cause="a layer that was never captured and is zeros, or rows that were padded by somebody in "
          "between"),
    *(Fault(Symptom.DENSE_COLUMN, since=since, until=until,
            cause="layer 0: an MTP draft model's MoE layer calls itself that and writes there; fixed in "
            "0.26.0 (vllm#48622), so take the speculative method out, or another release")
      for since, until in _DRAFTS),
    Fault(Symptom.DENSE_COLUMN, cause=f"{_ANOTHER}, or its layers were counted from 1"),
    *(Fault(Symptom.RANGE, since=since, until=until,
            cause="physical ids under EPLB: 0.14 and 0.21 capture after experts were mapped to their copies; "
            f"fixed in {until} (vllm#33013). Take enable_eplb=False")
      for since, until in _PHYSICAL),
    Fault(Symptom.RANGE,
          cause=f"{_ANOTHER}, or somebody in between narrowed the dtype or put a sentinel in (-1)"),
    Fault(Symptom.TOO_FEW_ROWS, since="0.21.0", until=SCHEDULER,
          cause="0.21.0 keeps the prompt's rows apart, in RequestOutput.prompt_routed_experts, at the top of "
          "an answer over HTTP: pass the whole output, not one completion"),
    Fault(Symptom.TOO_FEW_ROWS, since=SCHEDULER,
          cause="the request was sent with routed_experts_prompt_start: pass the same here as start="),
    Fault(Symptom.TOO_FEW_ROWS, cause=_RETOKENISED),
    Fault(Symptom.TOO_MANY_ROWS,
          cause="tokens were taken off the end: pass output_token_ids= beside the whole output"),
    Fault(Symptom.TOO_MANY_ROWS,
          cause="start= was passed and the request hadn't routed_experts_prompt_start (/v1 endpoints know it "
          "from 0.28.0 on)"),
    Fault(Symptom.TOO_MANY_ROWS, cause=_RETOKENISED),
    Fault(Symptom.STALE_ROWS, until="0.16.0",
          cause="0.14's shared memory has one name for all data-parallel ranks, which overwrite each other; "
          "fixed in 0.16.0"),
    Fault(Symptom.STALE_ROWS,
          cause="rows read from KV cache slots that another request had taken: preemption, or a connector "
          "that moves KV blocks"),
    Fault(Symptom.COLUMNS, cause=f"{_ANOTHER}, or counts its MoE layers in another way"),
    Fault(Symptom.TOPK, cause=_ANOTHER),
)
# fmt: on


# ---- what some rows below ask a plan


def _speculation(plan: Plan) -> tuple[str, str]:
    """The method and the draft."""
    config = as_mapping(plan.get("speculative_config"))
    return str(config.get("method") or "").lower(), str(config.get("model") or "").lower()


def _by_mtp(plan: Plan, _: Any) -> bool:
    return "mtp" in _speculation(plan)[0]


def _by_dspark(plan: Plan, _: Any) -> bool:
    method, draft = _speculation(plan)
    return method == "dspark" or (not method and "dspark" in draft)


def _by_dflash(plan: Plan, _: Any) -> bool:
    return _speculation(plan)[0] == "dflash"


def _by_a_model(plan: Plan, _: Any) -> bool:
    without = ("ngram", "suffix", "medusa", "mlp_speculator")
    return bool(as_mapping(plan.get("speculative_config"))) and not _speculation(plan)[0].startswith(without)


def _adaptively(plan: Plan, _: Any) -> bool:
    return bool(as_mapping(plan.get("speculative_config")).get("enable_adaptive_verification"))


def _disaggregated(plan: Plan, _: Any) -> bool:
    names = list(_connectors(plan.get("kv_transfer_config")))
    return any(name.startswith(("Nixl", "MoRIIO")) or name == "MooncakeConnector" for name in names)


def _connectors(value: Any) -> Iterator[str]:
    """The names of the KV connectors in a kv_transfer_config, those within a MultiConnector too."""
    config = as_mapping(value)
    yield str(config.get("kv_connector") or "")
    inner = as_mapping(config.get("kv_connector_extra_config")).get("connectors")
    for one in inner if isinstance(inner, (list, tuple)) else ():
        yield from _connectors(one)


def _with_experts_spread(plan: Plan, arguments: tuple[str, ...]) -> bool:
    return several(plan, arguments) and plan.get("enable_expert_parallel") is True


def _no_generation(plan: Plan, _: Any) -> bool:
    return plan.get("runner") not in (None, "auto", "generate")


def _of_a_hybrid(plan: Plan, _: Any) -> bool:
    return is_hybrid(plan.get("model"))


def _of_another_topk(plan: Plan, _: Any) -> bool:
    return not names_topk(plan.get("model"))


# fmt: off
# ---- plans with which releases give none

_REFUSED = "vLLM refuses it when it starts"
_NO_STAGES = "1: no release captures over pipeline stages"
_NO_CONNECTOR = "no KV connector, or one that offloads with vLLM 0.31.0 or later"

CLASHES = (
    Clash((SWITCH,), off, instead="True, or nothing", why="it is the switch itself"),
    Clash(("pipeline_parallel_size",), several, until="0.21.0", instead=_NO_STAGES,
          why="only the last stage's layers are captured, the others are zeros, and it isn't refused "
          "(vllm#35623)"),
    Clash(("pipeline_parallel_size",), several, since="0.21.0", instead=_NO_STAGES, why=_REFUSED),
    *(Clash((name,), several, why=_REFUSED,
            instead="1: no release captures under context parallelism")
      for name in ("decode_context_parallel_size", "prefill_context_parallel_size")),
    *(Clash(("enable_eplb",), on, since=since, until=until,
            instead="False, or vLLM 0.16.0 to 0.20.2, or 0.22.0 or later",
            why="ids are captured after experts were mapped to their copies: they are physical (vllm#33013)")
      for since, until in _PHYSICAL),
    Clash(("data_parallel_size",), several, until="0.16.0",
          instead="1, or vLLM 0.16.0 or later (best 0.22.0 and later)",
          why="the shared memory that rows go through has one name for all data-parallel ranks"),
    Clash(("data_parallel_size",), _with_experts_spread, since="0.16.0", until="0.20.0", mended=True,
          instead="1, enable_expert_parallel=False, or vLLM 0.20.0 or later",
          why="an assertion fails in the first step where each rank routes its own tokens (modular kernels)"),
    Clash(("nnodes",), several, until="0.21.0", instead="1, or vLLM 0.22.0 or later",
          why="rows go through shared memory of one host"),
    Clash(("kv_transfer_config",), on, until=SCHEDULER, instead=_NO_CONNECTOR,
          why="tokens whose KV blocks come from outside have no rows, and it isn't refused"),
    Clash(("kv_transfer_config",), on, since=SCHEDULER, until=BY_BLOCK, instead=_NO_CONNECTOR,
          why=_REFUSED),
    Clash(("kv_transfer_config",), _disaggregated, since=BY_BLOCK,
          instead="connectors that offload; prefill and decode in one engine",
          why="vLLM refuses those of Nixl, MoRIIO and Mooncake when it starts: rows don't travel with KV "
          "blocks"),
    Clash(("kv_offloading_size",), on, until=BY_BLOCK, instead="nothing, or vLLM 0.31.0 or later",
          why="it is a KV connector: tokens whose KV blocks come back from outside have no rows"),
    Clash(("async_scheduling",), on, since="0.21.0", until=SCHEDULER,
          instead="False, or vLLM 0.22.0 or later", why=_REFUSED),
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
    Clash(("speculative_config",), _adaptively, since=BY_BLOCK,
          instead="enable_adaptive_verification=False", why=_REFUSED),
    Clash(("moe_backend",), says("flashinfer_trtllm"), until="0.27.0",
          instead='"triton" or another, or vLLM 0.27.0 or later',
          why="the kernel chooses experts by itself, past the capture, and every id is 0 (vllm#44116)"),
    Clash(("runner",), _no_generation, instead='"generate"', why="only generation has routes"),
    Clash(("model",), _of_a_hybrid, until="0.21.0", got="a hybrid model",
          problem="reads the rows of a model with linear attention from the wrong place",
          instead="vLLM 0.22.0 or later",
          why="it has several KV cache groups, whose slots are counted otherwise (vllm#37118, #40692)"),
    Clash(("model",), _of_another_topk, until=SCHEDULER, got="a config without num_experts_per_tok",
          problem="doesn't find this model's top-k", instead="vLLM 0.22.0 or later",
          why="a family with another key (Gemma 4: top_k_experts, vllm#41401), with which it doesn't start"),
)

# ---- what holds where a plan doesn't tell whether it matters

LIMITS = (
    Limit(until=SCHEDULER,
          words="a completion that a stop string ends has no routes before 0.22.0 (stop_token_ids are fine)"),
    Limit(until=SCHEDULER, words="an aborted request has no routes before 0.22.0"),
    Limit(until="0.21.0", words="there are no routes over HTTP before 0.21.0"),
    Limit(until="0.21.0", words="rows go through shared memory of one host, as large as the KV cache has "
          "slots, times layers and top-k: see that /dev/shm has room"),
    Limit(until="0.21.0", words="async_scheduling=False is passed: with it, rows are read from slots that "
          "may have been given away"),
    Limit(since="0.21.0", until=SCHEDULER, words="0.21.0 drops the routes of preempted requests, and takes "
          "no sequence parallelism, and no data parallelism without modular kernels"),
    Limit(until="0.27.0", device="cuda", words="FlashInfer's monolithic MoE kernels, which vLLM takes by "
          "itself on Blackwell and for NVFP4, give zeros before 0.27.0 (vllm#44116): pass "
          "moe_backend='triton' or another there"),
    Limit(until="0.28.0", device="cuda", words="Model Runner V2 captures nothing before 0.28.0: vLLM falls "
          "back to V1, or refuses to start where VLLM_USE_V2_MODEL_RUNNER=1 asks for V2, so leave it unset"),
    Limit(until="0.17.0", device="cuda", words="rows are captured on CUDA devices alone before 0.17.0"),
    Limit(until="0.30.0", device="cpu",
          words="on a CPU every id is 0 before 0.30.0, and from 0.27.0 on vLLM refuses to start"),
    Limit(since="0.30.0", words="/inference/v1/generate is served with --enable-scale-out alone (or "
          "--tokens-only) from 0.30.0 on"),
    Limit(since=BY_BLOCK, words="Model Runner V2 needs Triton: without it, as on most CPUs, vLLM refuses to "
          "start («Model Runner V2 requires Triton»), so take an earlier release there"),
    Limit(since=BY_BLOCK, device="cpu", words="on a CPU without AMX vLLM turns the prefix cache off for "
          "latent attention (DeepSeek), and then refuses it: «AuxOutput Connector requires prefix caching»"),
    Limit(until=SCHEDULER, mended=True,
          words="sequence parallelism of MoE layers ends in an AssertionError before 0.22.0, or is refused"),
    Limit(since=SCHEDULER, until=BY_BLOCK, words="the scheduler keeps rows of every KV cache slot in host "
          "memory: slots times layers times top-k bytes"),
    Limit(since=SCHEDULER, until=BY_BLOCK, words="a routed_experts_prompt_start that isn't below the "
          "prompt's length ends the engine before 0.31.0"),
    Limit(until=BY_BLOCK, words="outputs that are merged while they wait in a stream lose their routes "
          "before 0.31.0: use RequestOutputKind.FINAL_ONLY"),
    Limit(since=SCHEDULER, words="tokens from the prefix cache have the rows of whoever computed them first: "
          "reset it when weights change"),
    Limit(since=BY_BLOCK, words="rows are kept in aux_output_config's max_bytes; where that is too small, "
          "requests fail with BlockObjectStoreError"),
    Limit(when=_by_dflash, since="0.26.0", until="0.28.0", words="a DFlash draft that mixes sliding-window "
          "and full attention needs Model Runner V2, which captures nothing before 0.28.0: vLLM refuses it "
          "when it starts"),
    *(Limit(when=_by_a_model, since=since, until=until, mended=True,
            words="a draft model that has MoE layers of its own overwrites layer 0 before 0.26.0")
      for since, until in _DRAFTS),
)
# fmt: on


def needs_sync(version: str) -> bool:
    """Are rows right with async_scheduling=False alone?"""
    return any(run.holds(version) and "async_scheduling" in some for run, some in NEEDED)
