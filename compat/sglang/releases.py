"""SGLang by release: what can be wrong with its routes, which plans give none, what else holds. Rows only.

Read off the released sources, 0.5.7 to 0.5.23; an issue's number is named where there is one.
"""

from __future__ import annotations

from typing import Any

from npu_replay.rollout.launch import number, on, says, several
from npu_replay.rollout.release_rules import Clash, Fault, Limit, Plan, Symptom

FIRST = "0.5.7"
HONOURS_START = "0.5.12"
"""The first release that leaves out the rows before `routed_experts_start_len`."""
STOPS_EXACTLY = "0.5.13"
"""The first release with no rows for tokens that it sampled after the end and took back."""
EAGLE = ("eagle", "eagle3", "nextn")

_ASK = (
    "each request must carry return_routed_experts=True, and the server enable_return_routed_experts=True (a "
    "gateway in between may drop the request's, sglang#20696)"
)
_OTHER_TOKENS = (
    "the token ids aren't the engine's own (text that was tokenised again, tokens of several turns)"
)

# fmt: off
# ---- what can be wrong; of several that fit, the likeliest first

FAULTS = (
    Fault(Symptom.MISSING, since=FIRST, cause=_ASK),
    Fault(Symptom.MISSING, until=FIRST, sure=True, always="can't return routes", instead="0.5.7 or later",
          cause="SGLang returns routes from 0.5.7 on"),
    *(Fault(symptom, until=STOPS_EXACTLY,
            cause="the batch held requests with and without return_routed_experts, and this one was given "
            "another's routes (sglang#26423, fixed in 0.5.13): let all requests of a server carry it")
      for symptom in (Symptom.TOO_FEW_ROWS, Symptom.TOO_MANY_ROWS)),
    Fault(Symptom.TOO_FEW_ROWS, since=HONOURS_START,
          cause="the request carried a routed_experts_start_len that from_sglang wasn't told as start_len"),
    Fault(Symptom.TOO_FEW_ROWS, cause=_OTHER_TOKENS),
    Fault(Symptom.TOO_MANY_ROWS, cause=_OTHER_TOKENS),
    Fault(Symptom.TOO_MANY_ROWS, until=STOPS_EXACTLY,
          cause="before 0.5.13 speculative decoding runs past the end of the request. It is cut off where "
          "from_sglang is told the version, from an answer of /generate, whose meta_info says by how much, "
          "unless the request was retracted"),
    Fault(Symptom.COLUMNS,
          cause="another model than the engine's, or its config read without the dense layers: SGLang sends "
          "a column for each decoder layer"),
    Fault(Symptom.RANGE, until="0.5.10", device="cuda",
          cause="on CUDA EPLB was on, and these are ids of places, not of experts (fixed in 0.5.10)"),
    Fault(Symptom.RANGE, until="0.5.23", device="npu",
          cause="on an NPU EPLB was on, and these are ids of places, not of experts (fixed in 0.5.23)"),
    Fault(Symptom.RANGE,
          cause="another model than the engine's, or a build that marks padded rows with -1 (sglang#36404)"),
    Fault(Symptom.ZEROS, until="0.5.9", device="npu",
          always="returns zeros on an NPU", instead="0.5.9 or later",
          cause="on an NPU SGLang 0.5.7 and 0.5.8 capture nothing, fixed in 0.5.9"),
    Fault(Symptom.ZEROS,
          cause="a MoE runner that routes inside its kernel (moe_runner_backend flashinfer_trtllm, "
          "flashinfer_mxfp4 or triton_kernel; «auto» takes one on some devices): name another, such as "
          "triton"),
    Fault(Symptom.ZERO_ROWS, until="0.5.12", cause="DeepEP, whose rows are gathered from 0.5.12 on"),
    Fault(Symptom.ZERO_ROWS, until="0.5.18",
          cause="NGRAM or DFLASH speculation, whose output is never captured (sglang#37949, DFLASH fixed in "
          "0.5.18)"),
    Fault(Symptom.ZERO_ROWS, since="0.5.18",
          cause="NGRAM or DSPARK speculation, whose output is never captured (sglang#37949)"),
    Fault(Symptom.ZERO_ROWS, cause="a decode node, which hasn't the rows of the prompt"),
    Fault(Symptom.CONSTANT_LAYER,
          cause="pipeline parallelism (layers of other stages are never captured), or layers that route by a "
          "table of tokens and aren't captured: name those as RoutedModel.hashed"),
    Fault(Symptom.DUPLICATES,
          cause="layers that were never captured and are zeros: pipeline parallelism, or a MoE runner that "
          "routes inside its kernel"),
    Fault(Symptom.DENSE_COLUMN, until="0.5.15",
          cause="the MoE layer of a draft model (MTP, EAGLE) wrote over layer 0 of the model (sglang#26980, "
          "fixed in 0.5.15)"),
    Fault(Symptom.DENSE_COLUMN, cause="another model than the engine's: its dense layers are others"),
    Fault(Symptom.STALE_ROWS, since="0.5.10",
          cause="padded rows at the edge of a chunk of the prefill, which hold a row of an earlier pass "
          "(sglang#36404)"),
    Fault(Symptom.STALE_ROWS,
          cause="a tier of cache beyond the device (HiCache, sglang#26975, not fixed): what comes back from "
          "it brings the routes of whoever had the place before"),
)
# fmt: on


# ---- what some rows below ask a plan


def _moves_experts(plan: Plan, _: Any) -> bool:
    return bool(
        plan.get("enable_eplb")
        or plan.get("ep_dispatch_algorithm")
        or number(plan.get("ep_num_redundant_experts")) > 0
        or plan.get("init_expert_location") not in (None, "trivial")
    )


def _more_requests_than_a_chunk(plan: Plan, _: Any) -> bool:
    chunk = number(plan.get("chunked_prefill_size"))
    spread = plan.get("enable_dp_attention") and number(plan.get("dp_size")) > 1
    return bool(spread) and 0 < chunk < number(plan.get("max_running_requests"))


def _drafts_a_tree(plan: Plan, _: Any) -> bool:
    return bool(plan.get("speculative_algorithm")) and number(plan.get("speculative_eagle_topk")) > 1


def _sends_tokens(plan: Plan, _: Any) -> bool:
    return bool(plan.get("enable_deepep_moe")) or plan.get("moe_a2a_backend") not in (None, "none")


def _without_chunks(plan: Plan, _: Any) -> bool:
    return number(plan.get("chunked_prefill_size")) < 0


# fmt: off
# ---- plans with which releases give none, or wrong ones

_EPLB = ("enable_eplb", "ep_dispatch_algorithm", "ep_num_redundant_experts", "init_expert_location")
_CACHES = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
_ONE_DRAFT = "none, or EAGLE with speculative_eagle_topk=1"

CLASHES = (
    Clash(("pp_size",), several, instead="1",
          why="only the layers of one pipeline stage would be captured"),
    Clash(_CACHES, on, instead="off: the radix cache of the device only",
          why="tokens that come back from a cache beyond the device bring another sequence's routes "
          "(sglang#26975, not fixed)"),
    Clash(("disaggregation_mode",), says("prefill", "decode"),
          instead="prefill and decode in one server", why="the node that decodes hasn't the rows of the "
          "prompt"),
    Clash(("speculative_algorithm",), says("ngram"), instead=_ONE_DRAFT,
          why="NGRAM speculation captures nothing of the output (sglang#37949, not fixed)"),
    Clash(("speculative_algorithm",), says("dspark"), instead=_ONE_DRAFT,
          why="DSPARK speculation captures nothing of the output"),
    Clash(("speculative_algorithm",), says("dflash"), until="0.5.18", instead="none, or 0.5.18 or later",
          why="DFLASH speculation captures nothing of the output before 0.5.18"),
    Clash(("speculative_eagle_topk",), _drafts_a_tree, instead="1",
          why="with a tree of drafts the rows of the output are permuted (sglang#37949, not fixed)"),
    Clash(("speculative_algorithm",), says("eagle", "nextn", "mtp", "frozen_kv_mtp"),
          until="0.5.15", instead="none, or 0.5.15 or later",
          why="the MoE layer of the draft writes over layer 0 of the model (sglang#26980, fixed in 0.5.15)"),
    Clash(_EPLB, _moves_experts, until="0.5.10", device="cuda", instead="no EPLB, or 0.5.10 or later",
          why="under EPLB this release returns ids of places, not of experts (fixed in 0.5.10)"),
    Clash(_EPLB, _moves_experts, until="0.5.23", device="npu", instead="no EPLB, or 0.5.23 or later",
          why="under EPLB this release returns ids of places on an NPU, and where there are as many places "
          "as experts that can't be seen (fixed in 0.5.23)"),
    Clash(("moe_a2a_backend", "enable_deepep_moe"), _sends_tokens, until="0.5.12",
          instead="none, or 0.5.12 or later",
          why="each rank captures its own share of the tokens, and they aren't gathered (fixed in 0.5.12)"),
    Clash(("moe_runner_backend",), says("triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4"),
          instead="a runner that is given its experts: triton, deep_gemm, cutlass, flashinfer_trtllm_routed",
          why="this MoE runner routes inside its kernel, where nothing is captured"),
    Clash(("chunked_prefill_size",), _without_chunks, instead="a number above 0",
          why="without chunks a long prompt overflows the capture's buffer, and the server dies "
          "(sglang#26860)"),
    Clash(("enable_dp_attention", "dp_size", "max_running_requests", "chunked_prefill_size"),
          _more_requests_than_a_chunk, until=STOPS_EXACTLY,
          instead="max_running_requests of chunked_prefill_size at most",
          why="under DP attention the capture's buffer is too small for so many requests (sglang#26123, "
          "fixed in 0.5.13)"),
)

# ---- what holds where a plan doesn't tell whether it matters

LIMITS = (
    Limit(words=_ASK),
    Limit(until=STOPS_EXACTLY,
          words="all requests of the server must ask for routes: beside one that doesn't, others are given "
          "each other's or the server dies (sglang#26423, fixed in 0.5.13)"),
    Limit(until="0.5.9",
          words="routes come from /generate only: the OpenAI endpoints have them from 0.5.9 on"),
    Limit(since="0.5.9",
          words="the OpenAI endpoints give the routes of the first choice only (ask for n=1), and don't say "
          "that a request was retracted"),
    Limit(until="0.5.10",
          words="under skip_tokenizer_init routes are a tensor, which the HTTP server can't send: call the "
          "engine in-process"),
    Limit(until="0.5.11", words="the scheduler waits for the routes of each step, which slows it down"),
    Limit(until=HONOURS_START,
          words="routed_experts_start_len is ignored: all rows come (from_sglang leaves out those before)"),
    Limit(until="0.5.15",
          words="a draft model for speculation must have no MoE layers (sglang#26980, fixed in 0.5.15)"),
    Limit(words="speculative decoding with many requests may overflow the capture's buffer: keep "
          "max_running_requests * speculative_num_draft_tokens within chunked_prefill_size (sglang#38717)"),
    Limit(since="0.5.12",
          words="of the all-to-all back ends, tokens are gathered for deepep only: look at the first routes "
          "of any other"),
    Limit(words="moe_runner_backend='auto' may take one that routes inside its kernel: name it"),
    Limit(words="the model's config must say num_experts_per_tok and num_hidden_layers by these names"),
    Limit(words="layers that route by a table of tokens (DeepSeek-V4's hash layers) aren't captured"),
    Limit(words="a hit in the prefix cache returns the rows that older weights made: flush the cache at each "
          "weight update (flush_cache=True)"),
    Limit(until="0.5.19",
          words="a request that is retracted is computed again, with the weights of then: its rows may not "
          "be those that sampled its tokens, and this release doesn't say so (0.5.19 does)"),
    Limit(since="0.5.19",
          words="a request that is retracted over a weight update is computed again: its rows aren't those "
          "that sampled its tokens, and from_sglang refuses them"),
    Limit(since="0.5.19", words="beam search with routes is rejected by the engine"),
    Limit(words="with max_new_tokens=0 the last token of the prompt has no row (sglang#20964)"),
    Limit(since="0.5.10",
          words="padded rows at the edge of a prefill chunk may hold an old row (sglang#36404): checked when "
          "routes come in"),
)
# fmt: on
