"""Holds SGLang's table of releases: the faults of its routes, and the plans that give none.

Read in the released source, 0.5.8 to 0.5.23; with the issue's number, if there is one. Limits that change no
verdict are in docs/dev/engine-limits.md.
"""

from __future__ import annotations

from typing import Any

from npu_replay.rollout.engine_plan import as_mapping, number, on, says, several
from npu_replay.rollout.model_config import is_there, quantization
from npu_replay.rollout.release_rules import Clash, EnginePlan, Fault, Symptom, older

OLDEST = "0.5.8"
"""The oldest release that is checked; answers of earlier ones are decoded by their shape."""
NEWEST = "0.5.23"
"""The newest release that was read."""
HONOURS_START = "0.5.12"
"""The first release that leaves out the rows before `routed_experts_start_len`."""
STOPS_EXACTLY = "0.5.13"
"""The first release with no rows for tokens that it sampled after the end and dropped."""
EAGLE = ("eagle", "eagle3", "nextn")

_ASK = (
    "each request must carry return_routed_experts=True, and the server enable_return_routed_experts=True (a "
    "gateway in between may drop the request's, sglang#20696)"
)
_OTHER_TOKENS = (
    "the token ids aren't the engine's own (text that was tokenised again, tokens of several turns)"
)

# fmt: off
# ---- faults; of several that fit, the likeliest first

FAULTS = (
    older(OLDEST, "0.5.8 or later"),
    Fault(Symptom.MISSING, cause=_ASK),
    Fault(Symptom.TOKENS,
          cause="text that was tokenised again (take output_ids from the answer, and cut the result with "
          "Rollout.truncate), a prompt without the BOS that the engine adds to text, one chunk of a stream, "
          "another sample's tokens, or pictures in the prompt that the engine turned into tokens"),
    Fault(Symptom.TOO_FEW_ROWS,
          cause="the request carried a routed_experts_start_len that from_sglang wasn't told as start_len; "
          "before 0.5.13 another's routes, from a batch of requests with and without return_routed_experts "
          f"(sglang#26423): let all requests of a server carry it; or {_OTHER_TOKENS}"),
    Fault(Symptom.TOO_MANY_ROWS, until=STOPS_EXACTLY,
          cause="before 0.5.13 speculative decoding and max_new_tokens=0 run past the end of a request: take "
          "0.5.13 or later, or do without them"),
    Fault(Symptom.TOO_MANY_ROWS, since=STOPS_EXACTLY, cause=_OTHER_TOKENS),
    Fault(Symptom.COLUMNS,
          cause="another model than the engine's, or its config read without the dense layers: SGLang sends "
          "a column for each decoder layer"),
    Fault(Symptom.RANGE, until="0.5.10", device="cuda",
          cause="on CUDA EPLB was on, and these are ids of places, not of experts (fixed in 0.5.10)"),
    Fault(Symptom.RANGE, until="0.5.23", device="npu",
          cause="on an NPU EPLB was on, and these are ids of places, not of experts (fixed in 0.5.23)"),
    Fault(Symptom.RANGE,
          cause="another model than the engine's"),
    Fault(Symptom.ZEROS, until="0.5.9", device="npu",
          always="returns zeros on an NPU", instead="0.5.9 or later",
          cause="on an NPU SGLang 0.5.8 captures nothing, fixed in 0.5.9"),
    Fault(Symptom.ZEROS,
          cause="a MoE runner that routes inside its kernel (moe_runner_backend flashinfer_trtllm, "
          "flashinfer_mxfp4 or triton_kernel; «auto» takes one on some devices): name another, such as "
          "triton"),
    Fault(Symptom.ZERO_ROWS,
          cause="NGRAM, DSPARK or, before 0.5.18, DFLASH speculation, whose output is never captured "
          "(sglang#37949); before 0.5.12 DeepEP, whose rows aren't gathered; a decode node, which hasn't the "
          "rows of the prompt; or, where they are -1, a build that marks padded rows so (sglang#36404)"),
    *(Fault(symptom,
            cause="layers that were never captured: pipeline parallelism, a MoE runner that routes inside "
            "its kernel, or layers that route by a table of tokens: name those as RoutedModel.hashed")
      for symptom in (Symptom.CONSTANT_LAYER, Symptom.DUPLICATES)),
    Fault(Symptom.DENSE_COLUMN, until="0.5.15",
          cause="the MoE layer of a draft model (MTP, EAGLE) wrote over layer 0 of the model (sglang#26980, "
          "fixed in 0.5.15)"),
    Fault(Symptom.DENSE_COLUMN, since="0.5.15",
          cause="another model than the engine's: its dense layers are others"),
    Fault(Symptom.STALE_ROWS, since="0.5.10",
          cause="padded rows at the edge of a chunk of the prefill, which hold a row of an earlier pass "
          "(sglang#36404)"),
    Fault(Symptom.STALE_ROWS, until="0.5.10",
          cause="a tier of cache beyond the device (HiCache, sglang#26975, not fixed): what comes back from "
          "it brings the routes of whoever had the place before"),
)
# fmt: on


# ---- rules of some rows below


def _moves_experts(plan: EnginePlan, _: Any) -> bool:
    return bool(
        plan.get("enable_eplb")
        or plan.get("ep_dispatch_algorithm")
        or number(plan.get("ep_num_redundant_experts")) > 0
        or plan.get("init_expert_location") not in (None, "trivial")
    )


def _dp_ranks(plan: EnginePlan) -> int:
    """Return the ranks that attention spreads requests over; 0.5.23 has a name of its own for them."""
    return max(number(plan.get("dp_size")), number(plan.get("attn_dp_size")))


def _spreads_requests(plan: EnginePlan) -> bool:
    on_ranks = plan.get("enable_dp_attention") or number(plan.get("attn_dp_size")) > 1
    return bool(on_ranks) and _dp_ranks(plan) > 1


def _more_requests_than_a_chunk(plan: EnginePlan, _: Any) -> bool:
    chunk = number(plan.get("chunked_prefill_size"))
    return _spreads_requests(plan) and 0 < chunk < number(plan.get("max_running_requests"))


def _gathers_before_routing(plan: EnginePlan) -> bool:
    """Return whether each rank's MoE layers see the tokens of all ranks: with an a2a backend they don't."""
    backend = plan.get("moe_a2a_backend") in (None, "none") and not plan.get("enable_deepep_moe")
    return _spreads_requests(plan) and backend


def _drafts_in_a_graph(plan: EnginePlan, _: Any) -> bool:
    decode = as_mapping(as_mapping(plan.get("cuda_graph_config")).get("decode")).get("backend")
    backends = plan.get("cuda_graph_backend_decode"), decode  # 0.5.23 has these names
    in_graphs = not plan.get("disable_cuda_graph") and "disabled" not in backends
    return _gathers_before_routing(plan) and in_graphs and bool(plan.get("speculative_algorithm"))


def _gathers_after_routing(plan: EnginePlan, _: Any) -> bool:
    """Return whether NVFP4 weights may have each rank route its own tokens, as with expert parallelism."""
    by_cutlass = plan.get("moe_runner_backend") == "flashinfer_cutlass"
    gathers_first = plan.get("disable_flashinfer_cutlass_moe_fp4_allgather")
    may_be_fp4 = plan.get("quantization") in ("modelopt", "modelopt_fp4") or (
        plan.get("quantization") is None and _may_be_quantized(plan.get("model_path"))
    )
    scatters = _gathers_before_routing(plan) and number(plan.get("ep_size")) == _dp_ranks(plan)
    return bool(by_cutlass and may_be_fp4 and scatters and not gathers_first)


def _may_be_quantized(model: Any) -> bool:
    return not is_there(model) or bool(quantization(model))


# fmt: off
# ---- plans with which releases give no routes, or wrong ones

_EPLB = ("enable_eplb", "ep_dispatch_algorithm", "ep_num_redundant_experts", "init_expert_location")
_CACHES = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
_CONTEXT = (
    *("attn_cp_size", "enable_prefill_cp", "enable_prefill_context_parallel"),
    *("enable_nsa_prefill_context_parallel", "enable_dsa_prefill_context_parallel"),
)
_ONE_DRAFT = "none, or EAGLE with speculative_eagle_topk=1"
_SPREAD = ("enable_dp_attention", "dp_size", "attn_dp_size")

CLASHES = (
    Clash(("pp_size",), several, instead="1",
          why="only the layers of one pipeline stage would be captured"),
    Clash(_CACHES, on, instead="off: the radix cache of the device only",
          why="tokens that come back from a cache beyond the device bring another sequence's routes "
          "(sglang#26975, not fixed)"),
    Clash(("disaggregation_mode",), says("prefill", "decode"),
          instead="prefill and decode in one server", why="the node that decodes hasn't the rows of the "
          "prompt"),
    Clash(("speculative_algorithm",), says("ngram", "dspark"), instead=_ONE_DRAFT,
          why="NGRAM and DSPARK speculation capture nothing of the output (sglang#37949, not fixed)"),
    Clash(("speculative_algorithm",), says("dflash"), until="0.5.18", instead="none, or 0.5.18 or later",
          why="DFLASH speculation captures nothing of the output before 0.5.18"),
    Clash(("speculative_eagle_topk",), instead="1",
          when=lambda plan, names: bool(plan.get("speculative_algorithm")) and several(plan, names),
          why="with a tree of drafts the rows of the output are permuted (sglang#37949, not fixed)"),
    Clash(("speculative_algorithm",), says("eagle", "nextn", "mtp", "frozen_kv_mtp"),
          until="0.5.15", instead="none, or 0.5.15 or later",
          why="the MoE layer of the draft writes over layer 0 of the model (sglang#26980, fixed in 0.5.15)"),
    Clash(_EPLB, _moves_experts, until="0.5.10", device="cuda", instead="no EPLB, or 0.5.10 or later",
          why="under EPLB this release returns ids of places, not of experts (fixed in 0.5.10)"),
    Clash(_EPLB, _moves_experts, until="0.5.23", device="npu", instead="no EPLB, or 0.5.23 or later",
          why="under EPLB this release returns ids of places on an NPU, and where there are as many places "
          "as experts that can't be seen (fixed in 0.5.23)"),
    Clash(("enable_two_batch_overlap",), on, instead="False",
          why="two half batches run at once, and both write their rows from the first on (sglang#4068): the "
          "first half's are lost, and behind them are an earlier step's"),
    Clash(_CONTEXT, lambda plan, names: on(plan, names[1:]) or several(plan, names[:1]),
          instead="1 and False",
          why="prefill over context-parallel ranks routes tokens in another order than the request has them, "
          "and the capture takes that order (sglang#18233)"),
    Clash(("moe_a2a_backend", "enable_deepep_moe"), until="0.5.12",
          when=lambda plan, names: plan.get(names[0]) not in (None, "none") or bool(plan.get(names[1])),
          instead="none, or 0.5.12 or later",
          why="each rank captures its own share of the tokens, and they aren't gathered (fixed in 0.5.12)"),
    Clash(("moe_a2a_backend",), since="0.5.12",
          when=lambda plan, names: plan.get(names[0]) not in (None, "none", "deepep", "deepep_v2"),
          instead="none or deepep",
          why="each rank captures its own share of the tokens, and those of deepep alone are gathered"),
    Clash(("moe_runner_backend",), says("triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4"),
          instead="a runner that is given its experts: triton, deep_gemm, cutlass, flashinfer_trtllm_routed",
          why="this MoE runner routes inside its kernel, where nothing is captured"),
    Clash(("chunked_prefill_size",), lambda plan, _: number(plan.get("chunked_prefill_size")) < 0,
          instead="a number above 0",
          why="without chunks a long prompt overflows the capture's buffer, and the server dies "
          "(sglang#26860)"),
    Clash(("enable_dp_attention", "dp_size", "max_running_requests", "chunked_prefill_size"),
          _more_requests_than_a_chunk, until=STOPS_EXACTLY,
          instead="max_running_requests of chunked_prefill_size at most",
          why="under DP attention the capture's buffer is too small for so many requests (sglang#26123, "
          "fixed in 0.5.13)"),
    Clash((*_SPREAD, "speculative_algorithm", "disable_cuda_graph"), _drafts_in_a_graph,
          instead="no speculation; disable_cuda_graph=True, or from 0.5.23 on "
          "cuda_graph_backend_decode='disabled'; or moe_a2a_backend='deepep'",
          why="in a graph under DP attention a rank's rows are looked for by its requests, and drafts give "
          "each request several rows: all ranks but the first hand out another's"),
    Clash((*_SPREAD, "moe_runner_backend", "ep_size", "quantization"), _gathers_after_routing,
          instead="disable_flashinfer_cutlass_moe_fp4_allgather=True, or another runner",
          why="with NVFP4 weights (modelopt_fp4) and as many expert-parallel as DP ranks each rank routes "
          "its own tokens, and all ranks but the first hand out another step's rows"),
)
# fmt: on
