"""vLLM by release: what can be wrong with the routes that it returns.

    0.14          shared memory, rows by KV cache slot; physical ids under EPLB
    0.15          the switch is there, and every id is 0
    0.16 to 0.20  logical ids; no pipeline parallelism, though it isn't refused
    0.21          the prompt's rows apart, MoE layers only; reverted in the next release
    0.22 to 0.30  rows through the scheduler, over HTTP too
    0.31 to 0.33  rows by KV block, with prefix caching

Read in the released source of 0.14.0, 0.15.1, 0.16.0, 0.20.2, 0.21.0, 0.22.0, 0.23.0, 0.24.0, 0.26.0, 0.27.0,
0.28.0, 0.30.0, 0.31.0 and 0.33.0. Nothing of vLLM is imported or changed.

Probes: nothing. Offers: `refusal`, `faults`, `drops_at_stop_string`, `never_captures`, and the releases in
which something came or was mended, by name, for whoever speaks of one. Nothing to undo.
"""

from __future__ import annotations

from npu_replay.compat import vllm_ascend as ascend
from npu_replay.errors import ReplayError
from npu_replay.rollout.admit import Fault, Symptom
from npu_replay.rollout.releases import Releases, tells_release

FIRST = "0.14.0"
NEWEST = "0.33.0"
"""The newest release whose source was read; what comes later is taken for its like."""

MEMORY_BY_RANK = "0.16.0"
"""The first release whose shared memory is each data-parallel rank's own."""
PHYSICAL = (Releases(until="0.16.0"), Releases(since="0.21.0", until="0.22.0"))
"""The releases whose ids are those of experts' copies under EPLB (vllm#33013)."""
REFUSES_STAGES = "0.21.0"
"""The first release that refuses pipeline stages, whose layers none captures."""
HYBRIDS = "0.21.0"
"""The first release that reads the rows of models with linear attention from the right place."""
HTTP = "0.21.0"
"""The first release with routes over HTTP."""
SCHEDULER = "0.22.0"
"""The first release whose scheduler hands rows on: after a stop string and an abort too."""
REFUSES_KERNELS = "0.27.0"
"""The first release that refuses MoE kernels that choose experts past the capture (vllm#44116)."""
CPU = "0.30.0"
"""The first release without such kernels on a CPU."""
SCALE_OUT = "0.30.0"
"""The first release that serves /inference/v1/generate with --enable-scale-out alone."""
BY_BLOCK = "0.31.0"
"""The first release that keeps rows by KV block: with prefix caching and Model Runner V2 alone."""
DRAFTS_OVERWRITE = (Releases(until="0.21.0"), Releases(since="0.22.0", until="0.26.0"))
"""The releases in which a draft's MoE layer calls itself layer 0 and overwrites the model's (vllm#48622)."""

SWITCH = "enable_return_routed_experts"
_MOST = f"{SCHEDULER} and later"

# ---- releases that give no routes, whatever they are started with


_TOO_OLD = Fault(
    symptom=Symptom.MISSING,
    until=FIRST,
    sure=True,
    cause=f"vLLM has no routes before {FIRST}. Take {_MOST}",
)
_UNBOUND = Fault(
    symptom=Symptom.ZEROS,
    since="0.15.0",
    until="0.16.0",
    device="cuda",  # vllm-ascend calls the capture by itself
    sure=True,
    cause="0.15 never binds the capture, so every id is 0; fixed in 0.16.0 (vllm#33013)",
)
_ON_CPU = Fault(
    symptom=Symptom.ZEROS,
    until=CPU,
    device="cpu",
    cause=f"on a CPU, vLLM's MoE kernels choose experts past the capture before {CPU} (from "
    f"{REFUSES_KERNELS} on it refuses to start so): take {CPU} or later",
)


def device_of(version: str, vllm_ascend: str) -> str:
    """What it runs on, as far as the releases tell: «npu», «cpu», or nothing."""
    return "npu" if vllm_ascend else "cpu" if "+cpu" in version else ""


def refusal(version: str, vllm_ascend: str = "") -> ReplayError | None:
    """Why that release gives no routes; None where it does, or where nothing tells what it is."""
    device = device_of(version, vllm_ascend) or "cuda"
    for fault in (_TOO_OLD, _UNBOUND, _ON_CPU):
        if tells_release(version) and fault.holds(version, device):
            none = fault.symptom is Symptom.MISSING
            return ReplayError(
                f"vLLM {version} {'has no routes' if none else 'gives zeros for every id'}",
                where="rollout",
                expected=f"vLLM 0.14, or 0.16.0 and later; best {_MOST}",
                got=version,
                cause=fault.cause,
            )
    return None


_LOST = (
    "rows lost with prefix caching and chunked prefill together, which NeMo-RL has seen now and then: switch "
    'one of them off, or pass missing="native" to leave them without a route'
)
_ANOTHER = "the config given here is another model's"
_RETOKENISED = "token ids of another sequence: text that was tokenised again, or turns that were put together"

_FAULTS = (
    Fault(
        symptom=Symptom.ZEROS,
        until=REFUSES_KERNELS,
        device="cuda",
        cause="on NVIDIA, FlashInfer's monolithic MoE kernels (chosen by themselves on Blackwell, and for "
        f"NVFP4) choose experts past the capture, refused from {REFUSES_KERNELS} on (vllm#44116)",
    ),
    _ON_CPU,
    Fault(
        symptom=Symptom.ZERO_ROWS,
        until=HYBRIDS,
        cause="models with linear attention (Qwen3-Next, Qwen3.5): rows are read by the slots of the wrong "
        "KV cache group, or past their end (vllm#37118, #40692); fixed in 0.22.0",
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        since="0.21.0",
        until=SCHEDULER,
        cause="tokens that come from the prefix cache have no rows in 0.21.0: start it with "
        "enable_prefix_caching=False, or take 0.22.0",
    ),
    Fault(symptom=Symptom.ZERO_ROWS, since=SCHEDULER, cause=_LOST),
    Fault(
        symptom=Symptom.CONSTANT_LAYER,
        until=REFUSES_STAGES,
        cause="pipeline parallelism: only the last stage's layers are captured, and it isn't refused "
        f"before {REFUSES_STAGES} (vllm#35623). Take pipeline_parallel_size=1",
    ),
    Fault(
        symptom=Symptom.CONSTANT_LAYER,
        cause="a layer that was never captured: its router isn't one that vLLM binds, or the model's "
        "config counts another layer as MoE",
    ),
    Fault(
        symptom=Symptom.DUPLICATES,
        until=REFUSES_STAGES,
        cause="layers that were never captured and are zeros: earlier pipeline stages (vllm#35623). Take "
        "pipeline_parallel_size=1",
    ),
    Fault(
        symptom=Symptom.DUPLICATES,
        cause="a layer that was never captured and is zeros, or rows that were padded by somebody in between",
    ),
    *(
        Fault(
            symptom=Symptom.DENSE_COLUMN,
            since=run.since,
            until=run.until,
            cause="layer 0: an MTP draft model's MoE layer calls itself that and writes there; fixed in "
            "0.26.0 (vllm#48622), so take the speculative method out, or another release",
        )
        for run in DRAFTS_OVERWRITE
    ),
    Fault(symptom=Symptom.DENSE_COLUMN, cause=f"{_ANOTHER}, or its layers were counted from 1"),
    *(
        Fault(
            symptom=Symptom.RANGE,
            since=run.since,
            until=run.until,
            cause="physical ids under EPLB: 0.14 and 0.21 capture after experts were mapped to their copies; "
            f"fixed in {run.until} (vllm#33013). Take enable_eplb=False",
        )
        for run in PHYSICAL
    ),
    Fault(
        symptom=Symptom.RANGE,
        cause=f"{_ANOTHER}, or somebody in between narrowed the dtype or put a sentinel in (-1)",
    ),
    Fault(
        symptom=Symptom.TOO_FEW_ROWS,
        since="0.21.0",
        until=SCHEDULER,
        cause="0.21.0 keeps the prompt's rows apart, in RequestOutput.prompt_routed_experts, at the top of "
        "an answer over HTTP: pass the whole output, not one completion",
    ),
    Fault(
        symptom=Symptom.TOO_FEW_ROWS,
        since=SCHEDULER,
        cause="the request was sent with routed_experts_prompt_start: pass the same here as start=",
    ),
    Fault(symptom=Symptom.TOO_FEW_ROWS, cause=_RETOKENISED),
    Fault(
        symptom=Symptom.TOO_MANY_ROWS,
        cause="tokens were taken off the end: pass output_token_ids= beside the whole output",
    ),
    Fault(
        symptom=Symptom.TOO_MANY_ROWS,
        cause="start= was passed and the request hadn't routed_experts_prompt_start (/v1 endpoints know it "
        "from 0.28.0 on)",
    ),
    Fault(symptom=Symptom.TOO_MANY_ROWS, cause=_RETOKENISED),
    Fault(
        symptom=Symptom.STALE_ROWS,
        until=MEMORY_BY_RANK,
        cause="0.14's shared memory has one name for all data-parallel ranks, which overwrite each other; "
        "fixed in 0.16.0",
    ),
    Fault(
        symptom=Symptom.STALE_ROWS,
        cause="rows read from KV cache slots that another request had taken: preemption, or a connector "
        "that moves KV blocks",
    ),
    Fault(symptom=Symptom.COLUMNS, cause=f"{_ANOTHER}, or counts its MoE layers in another way"),
    Fault(symptom=Symptom.TOPK, cause=_ANOTHER),
)
"""What is wrong with those that there are; of several that fit, the likeliest first."""

_OTHER_PLATFORM = Fault(
    symptom=Symptom.ZEROS,
    since=REFUSES_KERNELS,
    cause="a platform or a kernel that chooses experts past vLLM's routers, so that nothing is captured",
)

# ---- completions without routes

_NO_HTTP = Fault(
    symptom=Symptom.MISSING,
    since=FIRST,
    until=HTTP,
    sure=True,
    cause="0.14 to 0.20 put no routes into answers over HTTP. Use the engine in-process (LLM, AsyncLLM), "
    "or take 0.22.0 or later",
)
_STOP_STRING = Fault(
    symptom=Symptom.MISSING,
    since=FIRST,
    until=SCHEDULER,
    sure=True,
    cause="a stop string ended it, and before 0.22.0 the scheduler, which looks routes up, doesn't know of "
    'those. Use stop_token_ids, take 0.22.0 or later, or pass missing="native" to leave such a completion '
    "without routes",
)
_SWITCHED_OFF = Fault(
    symptom=Symptom.MISSING,
    since=FIRST,
    cause=f"the engine was started without {SWITCH}=True (compat.vllm.engine_arguments says what to pass)",
)
_PREEMPTED = Fault(
    symptom=Symptom.MISSING,
    since=HTTP,
    until=SCHEDULER,
    cause=f"the request was preempted, of which 0.21.0 drops the routes: take {_MOST}",
)
_MERGED_STREAM = tuple(
    Fault(
        symptom=Symptom.MISSING,
        since=since,
        until=until,
        cause="it was read as a stream, and pieces that wait for each other are merged without the routes: "
        f"fixed in {BY_BLOCK}, use RequestOutputKind.FINAL_ONLY before",
    )
    for since, until in ((FIRST, "0.21.0"), (SCHEDULER, BY_BLOCK))
)
_RUST = Fault(
    symptom=Symptom.MISSING,
    since=SCHEDULER,
    cause="it is vLLM's Rust front end, which never returns routes",
)
BEAMS = "beam search, which puts its completions together without routes in every release: sample instead"
_BEAMS = Fault(
    symptom=Symptom.MISSING,
    since=FIRST,
    cause=BEAMS,
)


_ALONE = Fault(
    symptom=Symptom.MISSING,
    cause="something in between that dropped them, since other completions of this request have theirs",
)


def faults(*, http: bool, stop_string: bool, alone: bool = False, vllm_ascend: str = "") -> tuple[Fault, ...]:
    """What can be wrong with one completion's routes, by the way it came and how it ended.

    Args:
        http: did it come over HTTP?
        stop_string: did a stop string end it?
        alone: have others of its request routes, so that the engine gives some?
        vllm_ascend: the plugin's release; empty where there may be any, or none.
    """
    missing = (
        *((_STOP_STRING,) if stop_string else ()),
        *((_NO_HTTP,) if http and not alone else ()),
        *((_ALONE,) if alone else (_SWITCHED_OFF, *((_RUST,) if http else _MERGED_STREAM), _BEAMS)),
        _PREEMPTED,
        _TOO_OLD,
    )
    if vllm_ascend:
        return (*missing, *ascend.faults(vllm_ascend), *_FAULTS, _OTHER_PLATFORM)
    return (*missing, _UNBOUND, *_FAULTS, *ascend.guesses(), _OTHER_PLATFORM)


def drops_at_stop_string(version: str) -> bool:
    """Does this release give no routes for a completion that a stop string ended?"""
    return _STOP_STRING.holds(version)


def never_captures(version: str, vllm_ascend: str) -> bool:
    """Is every id of that release 0, whatever it ran?"""
    if vllm_ascend and ascend.row_of(vllm_ascend).captures == "zeros":
        return True
    useless = refusal(version, vllm_ascend)
    return useless is not None and "zeros" in useless.problem
