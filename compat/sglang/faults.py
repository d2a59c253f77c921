"""SGLang, release by release: what is wrong with the routes it returns, how it is told to return them, and
which plans it can't do that with.

Read off the released sources, 0.5.7 to 0.5.23; an issue's number is named where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from npu_replay.errors import ReplayError
from npu_replay.rollout.admit import Fault, Symptom
from npu_replay.rollout.launch import EngineArguments, Limit, limits_of
from npu_replay.rollout.releases import Releases, release, tells_release

FIRST = "0.5.7"
_ON_NPU = "0.5.9"
"""The first release that captures on an NPU."""
_OPENAI = "0.5.9"
"""The first release whose OpenAI endpoints have routes."""
_LOGICAL = {"cuda": "0.5.10", "npu": "0.5.23"}
"""The first releases with ids of experts under EPLB, not of places."""
_DRAFTS_APART = "0.5.15"
"""The first release in which a draft model's MoE layer doesn't write over layer 0 (sglang#26980)."""
_GATHERS = "0.5.12"
"""The first release that gathers what DeepEP spreads over the ranks."""
HONOURS_START = "0.5.12"
"""The first release that leaves out the rows before `routed_experts_start_len`."""
STOPS_EXACTLY = "0.5.13"
"""The first release with no rows for tokens that it sampled after the end and took back."""
SAYS_SPANS = "0.5.19"
"""The first release that says which weights sampled which tokens."""

_ASK = (
    "each request must carry return_routed_experts=True, and the server enable_return_routed_experts=True (a "
    "gateway in between may drop the request's, sglang#20696)"
)
_MIXED = (
    "the batch held requests with and without return_routed_experts, and this one was given another's routes "
    "(sglang#26423, fixed in 0.5.13): let all requests of a server carry it"
)
_OTHER_TOKENS = (
    "the token ids aren't the engine's own (text that was tokenised again, tokens of several turns)"
)

FAULTS = (
    Fault(symptom=Symptom.MISSING, since=FIRST, cause=_ASK),
    Fault(
        symptom=Symptom.MISSING,
        until=FIRST,
        sure=True,
        cause=f"SGLang returns routes from {FIRST} on",
    ),
    *(
        Fault(symptom=symptom, until=STOPS_EXACTLY, cause=_MIXED)
        for symptom in (Symptom.TOO_FEW_ROWS, Symptom.TOO_MANY_ROWS)
    ),
    Fault(
        symptom=Symptom.TOO_FEW_ROWS,
        since=HONOURS_START,
        cause="the request carried a routed_experts_start_len that from_sglang wasn't told as start_len",
    ),
    Fault(symptom=Symptom.TOO_FEW_ROWS, cause=_OTHER_TOKENS),
    Fault(symptom=Symptom.TOO_MANY_ROWS, cause=_OTHER_TOKENS),
    Fault(
        symptom=Symptom.TOO_MANY_ROWS,
        until=STOPS_EXACTLY,
        cause=f"before {STOPS_EXACTLY} speculative decoding runs past the end of the request. It is cut off "
        "where from_sglang is told the version, from an answer of /generate, whose meta_info says by how "
        "much, unless the request was retracted",
    ),
    Fault(
        symptom=Symptom.COLUMNS,
        cause="another model than the engine's, or its config read without the dense layers: SGLang sends "
        "a column for each decoder layer",
    ),
    *(
        Fault(
            symptom=Symptom.RANGE,
            until=until,
            device=device,
            cause=f"on {'an NPU' if device == 'npu' else 'CUDA'} EPLB was on, and these are ids of places, "
            f"not of experts (fixed in {until})",
        )
        for device, until in _LOGICAL.items()
    ),
    Fault(
        symptom=Symptom.RANGE,
        cause="another model than the engine's, or a build that marks padded rows with -1 (sglang#36404)",
    ),
    Fault(
        symptom=Symptom.ZEROS,
        until=_ON_NPU,
        device="npu",
        cause="on an NPU SGLang 0.5.7 and 0.5.8 capture nothing, fixed in 0.5.9",
    ),
    Fault(
        symptom=Symptom.ZEROS,
        cause="a MoE runner that routes inside its kernel (moe_runner_backend flashinfer_trtllm, "
        "flashinfer_mxfp4 or triton_kernel; «auto» takes one on some devices): name another, such as triton",
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        until=_GATHERS,
        cause=f"DeepEP, whose rows are gathered from {_GATHERS} on",
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        until="0.5.18",
        cause="NGRAM or DFLASH speculation, whose output is never captured (sglang#37949, DFLASH fixed in "
        "0.5.18)",
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        since="0.5.18",
        cause="NGRAM or DSPARK speculation, whose output is never captured (sglang#37949)",
    ),
    Fault(symptom=Symptom.ZERO_ROWS, cause="a decode node, which hasn't the rows of the prompt"),
    Fault(
        symptom=Symptom.CONSTANT_LAYER,
        cause="pipeline parallelism (layers of other stages are never captured), or layers that route by a "
        "table of tokens and aren't captured: name those as RoutedModel.hashed",
    ),
    Fault(
        symptom=Symptom.DUPLICATES,
        cause="layers that were never captured and are zeros: pipeline parallelism, or a MoE runner that "
        "routes inside its kernel",
    ),
    Fault(
        symptom=Symptom.DENSE_COLUMN,
        until=_DRAFTS_APART,
        cause="the MoE layer of a draft model (MTP, EAGLE) wrote over layer 0 of the model (sglang#26980, "
        f"fixed in {_DRAFTS_APART})",
    ),
    Fault(symptom=Symptom.DENSE_COLUMN, cause="another model than the engine's: its dense layers are others"),
    Fault(
        symptom=Symptom.STALE_ROWS,
        since="0.5.10",
        cause="padded rows at the edge of a chunk of the prefill, which hold a row of an earlier pass "
        "(sglang#36404)",
    ),
    Fault(
        symptom=Symptom.STALE_ROWS,
        cause="a tier of cache beyond the device (HiCache, sglang#26975, not fixed): what comes back from it "
        "brings the routes of whoever had the place before",
    ),
)
"""What is known to be wrong with SGLang's routes; of several that fit, the likeliest first."""


def engine_arguments(
    version: str, *, planned: Mapping[str, Any] | None = None, device: Literal["cuda", "npu"] = "cuda"
) -> EngineArguments:
    """What makes this release of SGLang return routes, and what it can't do then.

    Args:
        version: of the engine, «0.5.12.post1».
        planned: the other arguments of the server, as ServerArgs or the command line names them.
        device: what it runs on.

    Returns:
        `planned`, under the names that ServerArgs has, with what turns the routes on, and with one draft a
        step where EAGLE would choose by itself. Each request must ask for them too: `request_arguments`.

    Raises:
        ReplayError: a release without routes, a plan under which they would be wrong or missing, or another
            device.
    """
    plan = _named_as_in_python(planned or {}, version)
    if device not in ("cuda", "npu"):
        raise ReplayError("unknown device", where="device", expected="cuda, npu", got=repr(device))
    device = "npu" if plan.get("device") == "npu" else device
    _refuse_release(version, device)
    for clash in _CLASHES:
        if clash.holds(version, device) and clash.planned(plan):
            raise ReplayError(
                f"routes would be wrong or missing: {clash.why}",
                where=f"SGLang {version}",
                expected=clash.expected,
                got=", ".join(f"{key}={plan[key]!r}" for key in clash.keys if plan.get(key) is not None),
            )
    limits = tuple(limits_of(_LIMITS, version, device))
    turned_on = {**plan, **_one_draft_a_step(plan), "enable_return_routed_experts": True}
    return EngineArguments(turned_on, limits, negates=False)


def request_arguments(version: str, *, start_len: int = 0) -> dict[str, Any]:
    """What each request to this release must carry, beside its prompt.

    Args:
        version: of the engine.
        start_len: the rows before it aren't wanted, at most the prompt's tokens; a release before 0.5.12
            sends them anyway, and from_sglang leaves them out.

    Raises:
        ReplayError: a release without routes, or a negative start.
    """
    _refuse_release(version, "cuda")
    if start_len < 0:
        raise ReplayError("routes can't start before the prompt", expected="0 or more", got=start_len)
    honoured = start_len > 0 and release(version) >= release(HONOURS_START)
    return {"return_routed_experts": True, **({"routed_experts_start_len": start_len} if honoured else {})}


_OTHER_NAMES = {
    **dict.fromkeys(("tp", "tensor_parallel_size"), "tp_size"),
    **dict.fromkeys(("pp", "pipeline_parallel_size"), "pp_size"),
    **dict.fromkeys(("dp", "data_parallel_size"), "dp_size"),
    **dict.fromkeys(("ep", "expert_parallel_size"), "ep_size"),
}
"""How its command line names an argument too: by an alias, or as the start of its name."""
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}


def _named_as_in_python(planned: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Each argument by its one name, and each flag as a bool: "False" is a text, and would turn it on."""
    plan: dict[str, Any] = {}
    for given, value in planned.items():
        dashless = given.lstrip("-").replace("-", "_")
        name = _OTHER_NAMES.get(dashless, dashless)
        if isinstance(value, str) and name.startswith(("enable_", "disable_")):
            if value.lower() not in _FLAGS:
                raise ReplayError(
                    "this argument is on or off",
                    where=f"SGLang {version}, {given}",
                    expected="a bool",
                    got=value,
                )
            value = _FLAGS[value.lower()]
        if name in plan and plan[name] != value:
            raise ReplayError(
                "an argument is planned twice",
                where=f"SGLang {version}, {name}",
                expected="one value",
                got=f"{plan[name]}, {value}",
            )
        plan[name] = value
    return plan


def _one_draft_a_step(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What keeps EAGLE from a tree of drafts, which it chooses by itself for some models (all that it doesn't
    know, in 0.5.7; Grok, to this day). It takes the three numbers together."""
    if str(plan.get("speculative_algorithm")).lower() not in _EAGLE:
        return {}
    if plan.get("speculative_adaptive"):  # its steps are its own
        return {"speculative_eagle_topk": 1}
    drafts, steps = plan.get("speculative_num_draft_tokens"), plan.get("speculative_num_steps")
    if steps is None:
        steps = _number(drafts) - 1 if _number(drafts) > 1 else 3  # SGLang's own choice for one draft a step
    return {
        "speculative_eagle_topk": 1,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": _number(steps) + 1 if drafts is None else drafts,
    }


def refusal(version: str, device: str) -> ReplayError | None:
    """Why that release returns no routes there; None where it does."""
    where = f"SGLang {version}"
    if release(version) < release(FIRST):
        return ReplayError(
            "this release can't return routes", where=where, expected=f"{FIRST} or later", got=version
        )
    if device == "npu" and release(version) < release(_ON_NPU):
        return ReplayError(
            "this release returns zeros on an NPU", where=where, expected=f"{_ON_NPU} or later", got=version
        )
    return None


def _refuse_release(version: str, device: str) -> None:
    release(version)  # or an error, for what is no text
    if not tells_release(version, numbers=3):
        raise ReplayError(
            "this is no release of SGLang",
            where="version",
            expected="a version such as 0.5.23; for a build of your own, the release that it comes from",
            got=version,
        )
    problem = refusal(version, device)
    if problem is not None:
        raise problem


@dataclass(frozen=True, kw_only=True)
class _Clash(Releases):
    """A plan under which the routes would be wrong or missing."""

    keys: tuple[str, ...]
    planned: Callable[[Mapping[str, Any]], bool]
    why: str
    expected: str


def _above_one(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda plan: any(_number(plan.get(key)) > 1 for key in keys)


def _on(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda plan: any(plan.get(key) for key in keys)


def _is(key: str, *values: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda plan: str(plan.get(key)).lower() in values


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _moves_experts(plan: Mapping[str, Any]) -> bool:
    return bool(
        plan.get("enable_eplb")
        or plan.get("ep_dispatch_algorithm")
        or _number(plan.get("ep_num_redundant_experts")) > 0
        or plan.get("init_expert_location") not in (None, "trivial")
    )


def _more_requests_than_a_chunk(plan: Mapping[str, Any]) -> bool:
    chunk = _number(plan.get("chunked_prefill_size"))
    return bool(
        plan.get("enable_dp_attention")
        and _number(plan.get("dp_size")) > 1
        and 0 < chunk < _number(plan.get("max_running_requests"))
    )


_EAGLE = ("eagle", "eagle3", "nextn")
_EPLB_KEYS = ("enable_eplb", "ep_dispatch_algorithm", "ep_num_redundant_experts", "init_expert_location")

_CLASHES = (
    _Clash(
        keys=("pp_size",),
        planned=_above_one("pp_size"),
        why="only the layers of one pipeline stage would be captured",
        expected="pp_size=1",
    ),
    _Clash(
        keys=("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv"),
        planned=_on("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv"),
        why="tokens that come back from a cache beyond the device bring another sequence's routes "
        "(sglang#26975, not fixed)",
        expected="the radix cache of the device only",
    ),
    _Clash(
        keys=("disaggregation_mode",),
        planned=_is("disaggregation_mode", "prefill", "decode"),
        why="the node that decodes hasn't the rows of the prompt",
        expected="prefill and decode in one server",
    ),
    _Clash(
        keys=("speculative_algorithm",),
        planned=_is("speculative_algorithm", "ngram"),
        why="NGRAM speculation captures nothing of the output (sglang#37949, not fixed)",
        expected="no speculation, or EAGLE with speculative_eagle_topk=1",
    ),
    _Clash(
        keys=("speculative_algorithm",),
        planned=_is("speculative_algorithm", "dspark"),
        why="DSPARK speculation captures nothing of the output",
        expected="no speculation, or EAGLE with speculative_eagle_topk=1",
    ),
    _Clash(
        until="0.5.18",
        keys=("speculative_algorithm",),
        planned=_is("speculative_algorithm", "dflash"),
        why="DFLASH speculation captures nothing of the output before 0.5.18",
        expected="no speculation, or 0.5.18 or later",
    ),
    _Clash(
        keys=("speculative_eagle_topk",),
        planned=lambda plan: (
            bool(plan.get("speculative_algorithm")) and _number(plan.get("speculative_eagle_topk")) > 1
        ),
        why="with a tree of drafts the rows of the output are permuted (sglang#37949, not fixed)",
        expected="speculative_eagle_topk=1",
    ),
    _Clash(
        until=_DRAFTS_APART,
        keys=("speculative_algorithm",),
        planned=_is("speculative_algorithm", "eagle", "nextn", "mtp", "frozen_kv_mtp"),
        why="the MoE layer of the draft writes over layer 0 of the model (sglang#26980, fixed in 0.5.15)",
        expected="no speculation, or 0.5.15 or later",
    ),
    _Clash(
        until=_LOGICAL["cuda"],
        device="cuda",
        keys=_EPLB_KEYS,
        planned=_moves_experts,
        why="under EPLB this release returns ids of places, not of experts (fixed in 0.5.10)",
        expected="no EPLB, or 0.5.10 or later",
    ),
    _Clash(
        until=_LOGICAL["npu"],
        device="npu",
        keys=_EPLB_KEYS,
        planned=_moves_experts,
        why="under EPLB this release returns ids of places on an NPU, and where there are as many places as "
        "experts that can't be seen (fixed in 0.5.23)",
        expected="no EPLB, or 0.5.23 or later",
    ),
    _Clash(
        until=_GATHERS,
        keys=("moe_a2a_backend", "enable_deepep_moe"),
        planned=lambda plan: (
            bool(plan.get("enable_deepep_moe")) or plan.get("moe_a2a_backend") not in (None, "none")
        ),
        why="each rank captures its own share of the tokens, and they aren't gathered (fixed in 0.5.12)",
        expected="moe_a2a_backend='none', or 0.5.12 or later",
    ),
    _Clash(
        keys=("moe_runner_backend",),
        planned=_is("moe_runner_backend", "triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4"),
        why="this MoE runner routes inside its kernel, where nothing is captured",
        expected="a runner that is given its experts: triton, deep_gemm, cutlass, flashinfer_trtllm_routed",
    ),
    _Clash(
        keys=("chunked_prefill_size",),
        planned=lambda plan: _number(plan.get("chunked_prefill_size")) < 0,
        why="without chunks a long prompt overflows the capture's buffer, and the server dies (sglang#26860)",
        expected="a chunked_prefill_size above 0",
    ),
    _Clash(
        until=STOPS_EXACTLY,
        keys=("enable_dp_attention", "dp_size", "max_running_requests", "chunked_prefill_size"),
        planned=_more_requests_than_a_chunk,
        why="under DP attention the capture's buffer is too small for so many requests (sglang#26123, fixed "
        "in 0.5.13)",
        expected="max_running_requests of chunked_prefill_size at most",
    ),
)

_LIMITS = (
    Limit(words=_ASK),
    Limit(
        until=STOPS_EXACTLY,
        words="all requests of the server must ask for routes: beside one that doesn't, others are given "
        "each other's or the server dies (sglang#26423, fixed in 0.5.13)",
    ),
    Limit(
        until=_OPENAI,
        words=f"routes come from /generate only: the OpenAI endpoints have them from {_OPENAI} on",
    ),
    Limit(
        since=_OPENAI,
        words="the OpenAI endpoints give the routes of the first choice only (ask for n=1), and don't say "
        "that a request was retracted",
    ),
    Limit(
        until="0.5.10",
        words="under skip_tokenizer_init routes are a tensor, which the HTTP server can't send: call the "
        "engine in-process",
    ),
    Limit(until="0.5.11", words="the scheduler waits for the routes of each step, which slows it down"),
    Limit(
        until=HONOURS_START,
        words="routed_experts_start_len is ignored: all rows come (from_sglang leaves out those before it)",
    ),
    Limit(
        until=_DRAFTS_APART,
        words="a draft model for speculation must have no MoE layers (sglang#26980, fixed in 0.5.15)",
    ),
    Limit(
        words="speculative decoding with many requests may overflow the capture's buffer: keep "
        "max_running_requests * speculative_num_draft_tokens within chunked_prefill_size (sglang#38717)"
    ),
    Limit(
        since=HONOURS_START,
        words="of the all-to-all back ends, tokens are gathered for deepep only: look at the first routes of "
        "any other",
    ),
    Limit(words="moe_runner_backend='auto' may take one that routes inside its kernel: name it"),
    Limit(words="the model's config must say num_experts_per_tok and num_hidden_layers by these names"),
    Limit(words="layers that route by a table of tokens (DeepSeek-V4's hash layers) aren't captured"),
    Limit(
        words="a hit in the prefix cache returns the rows that older weights made: flush the cache at each "
        "weight update (flush_cache=True)"
    ),
    Limit(
        until=SAYS_SPANS,
        words="a request that is retracted is computed again, with the weights of then: its rows may not be "
        "those that sampled its tokens, and this release doesn't say so (0.5.19 does)",
    ),
    Limit(
        since=SAYS_SPANS,
        words="a request that is retracted over a weight update is computed again: its rows aren't those "
        "that sampled its tokens, and from_sglang refuses them",
    ),
    Limit(since=SAYS_SPANS, words="beam search with routes is rejected by the engine"),
    Limit(words="with max_new_tokens=0 the last token of the prompt has no row (sglang#20964)"),
    Limit(
        since="0.5.10",
        words="padded rows at the edge of a prefill chunk may hold an old row (sglang#36404): checked when "
        "routes come in",
    ),
)
