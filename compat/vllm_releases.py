"""vLLM by release: what can be wrong with the routes that it returns.

    0.14          shared memory, rows by KV cache slot; physical ids under EPLB
    0.15          the switch is there, and every id is 0
    0.16 to 0.20  logical ids; no pipeline parallelism, though it isn't refused
    0.21          the prompt's rows apart, MoE layers only; reverted in the next release
    0.22 to 0.30  rows through the scheduler, over HTTP too
    0.31 to 0.33  rows by KV block, with prefix caching

Read in the released source of 0.14.0, 0.15.1, 0.16.0, 0.20.2, 0.21.0, 0.22.0, 0.23.0, 0.24.0, 0.26.0, 0.27.0,
0.28.0, 0.30.0, 0.31.0 and 0.33.0. Nothing of vLLM is imported or changed.

Probes: nothing. Offers: `FAULTS`, `faults`, `drops_at_stop_string`, `tells_release`, `FIRST`, `NEWEST`.
Nothing to undo.
"""

from __future__ import annotations

import re
from typing import Any

from npu_replay.door import Fault, Symptom

FIRST = "0.14.0"
NEWEST = "0.33.0"
"""The newest release whose source was read; what comes later is taken for its like."""

SWITCH = "enable_return_routed_experts"
_MOST = "0.22.0 and later"
_FLAG = f"the engine was started without {SWITCH}=True (compat.vllm.engine_arguments says what to pass)"

FAULTS = (
    Fault(
        symptom=Symptom.MISSING,
        since="0.21.0",
        until="0.22.0",
        cause=f"{_FLAG}, or the request was preempted, of which 0.21.0 drops the routes: take {_MOST}",
    ),
    Fault(
        symptom=Symptom.MISSING,
        since=FIRST,
        cause=_FLAG,
    ),
    Fault(
        symptom=Symptom.MISSING,
        until=FIRST,
        cause=f"vLLM has no routes before {FIRST}. Take {_MOST}",
    ),
    Fault(
        symptom=Symptom.ZEROS,
        since="0.15.0",
        until="0.16.0",
        cause="0.15 never binds the capture, so every id is 0; fixed in 0.16.0 (vllm#33013)",
    ),
    Fault(
        symptom=Symptom.ZEROS,
        since="0.24.0",
        until="0.27.0",
        cause="on Ascend, vllm-ascend 0.24.0rc1 to 0.26.0rc1 skip the capture (vllm-ascend#16314): take "
        "0.23.0.post1 or 0.27.1rc1. On NVIDIA, FlashInfer's monolithic MoE kernels choose experts past it, "
        "refused from 0.27.0 on (vllm#44116)",
    ),
    Fault(
        symptom=Symptom.ZEROS,
        until="0.27.0",
        cause="on NVIDIA, FlashInfer's monolithic MoE kernels (chosen by themselves on Blackwell, and for "
        "NVFP4) choose experts past the capture, refused from 0.27.0 on (vllm#44116). On Ascend, quantized "
        "experts are captured from vllm-ascend 0.27.1rc1 on",
    ),
    Fault(
        symptom=Symptom.ZEROS,
        cause="a platform or a kernel that chooses experts past vLLM's routers, so that nothing is captured",
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        until="0.21.0",
        cause="models with linear attention (Qwen3-Next, Qwen3.5): rows are read by the slots of the wrong "
        "KV cache group, or past their end (vllm#37118, #40692); fixed in 0.22.0",
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        since="0.21.0",
        until="0.22.0",
        cause="tokens that come from the prefix cache have no rows in 0.21.0: start it with "
        "enable_prefix_caching=False, or take 0.22.0",
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        since="0.22.0",
        until="0.31.0",
        cause="on Ascend, a hybrid model, or tokens split over ranks (npu_replay.compat.vllm_ascend.check "
        "says which). Else rows lost with prefix caching and chunked prefill together, which NeMo-RL has "
        'seen now and then: switch one of them off, or pass missing="native"',
    ),
    Fault(
        symptom=Symptom.ZERO_ROWS,
        cause="rows lost with prefix caching and chunked prefill together, which NeMo-RL has seen now and "
        'then: pass missing="native" to leave them without a route',
    ),
    Fault(
        symptom=Symptom.CONSTANT_LAYER,
        until="0.21.0",
        cause="pipeline parallelism: only the last stage's layers are captured, and it isn't refused "
        "before 0.21.0 (vllm#35623). Take pipeline_parallel_size=1",
    ),
    Fault(
        symptom=Symptom.CONSTANT_LAYER,
        cause="a layer that was never captured: its router isn't one that vLLM binds, or the model's "
        "config counts another layer as MoE",
    ),
    Fault(
        symptom=Symptom.DUPLICATES,
        until="0.21.0",
        cause="layers that were never captured and are zeros: earlier pipeline stages (vllm#35623). Take "
        "pipeline_parallel_size=1",
    ),
    Fault(
        symptom=Symptom.DUPLICATES,
        cause="a layer that was never captured and is zeros, or rows that were padded by somebody in between",
    ),
    Fault(
        symptom=Symptom.DENSE_COLUMN,
        until="0.26.0",
        cause="layer 0: an MTP draft model's MoE layer calls itself that and writes there; fixed in 0.26.0 "
        "(vllm#48622), so take the speculative method out, or another release. Any other layer: the config "
        "given here is another model's, or its layers were counted from 1",
    ),
    Fault(
        symptom=Symptom.DENSE_COLUMN,
        cause="the config given here is another model's, or its layers were counted from 1",
    ),
    Fault(
        symptom=Symptom.RANGE,
        until="0.16.0",
        cause="physical ids under EPLB: 0.14 captures after experts were mapped to their copies; fixed in "
        "0.16.0 (vllm#33013). Take enable_eplb=False",
    ),
    Fault(
        symptom=Symptom.RANGE,
        cause="the config given here is another model's, or somebody in between narrowed the dtype or put "
        "a sentinel in (-1)",
    ),
    Fault(
        symptom=Symptom.TOO_FEW_ROWS,
        since="0.21.0",
        until="0.22.0",
        cause="0.21.0 keeps the prompt's rows apart, in RequestOutput.prompt_routed_experts, at the top of "
        "an answer over HTTP: pass the whole output, not one completion; or token ids tokenised again",
    ),
    Fault(
        symptom=Symptom.TOO_FEW_ROWS,
        since="0.22.0",
        cause="the request was sent with routed_experts_prompt_start: pass the same here as start=; or token "
        "ids tokenised again, more than the engine ran",
    ),
    Fault(
        symptom=Symptom.TOO_FEW_ROWS,
        cause="token ids of another sequence: token ids tokenised again, or turns that were put together",
    ),
    Fault(
        symptom=Symptom.TOO_MANY_ROWS,
        cause="token ids of another sequence: tokens were taken off the end (pass output_token_ids= beside "
        "the whole output), the text was tokenised again, or start= was passed and the request hadn't "
        "routed_experts_prompt_start (/v1 endpoints know it from 0.28.0 on)",
    ),
    Fault(
        symptom=Symptom.STALE_ROWS,
        until="0.16.0",
        cause="0.14's shared memory has one name for all data-parallel ranks, which overwrite each other; "
        "fixed in 0.16.0",
    ),
    Fault(
        symptom=Symptom.STALE_ROWS,
        cause="rows read from KV cache slots that another request had taken: preemption, or a connector "
        "that moves KV blocks",
    ),
    Fault(
        symptom=Symptom.COLUMNS,
        cause="the config given here is another model's, or counts its MoE layers in another way",
    ),
    Fault(symptom=Symptom.TOPK, cause="the config given here is another model's"),
)
"""Of two that fit, the first is named, so the particular come before the general."""

_NO_HTTP = Fault(
    symptom=Symptom.MISSING,
    since=FIRST,
    until="0.21.0",
    cause="0.14 to 0.20 put no routes into answers over HTTP. Use the engine in-process (LLM, AsyncLLM), "
    "or take 0.22.0 or later",
)
_STOP_STRING = Fault(
    symptom=Symptom.MISSING,
    since=FIRST,
    until="0.22.0",
    cause="a stop string ended it, and before 0.22.0 the scheduler, which looks routes up, doesn't know of "
    'those. Use stop_token_ids, take 0.22.0 or later, or pass missing="native" to leave such a completion '
    "without routes",
)
_MERGED_STREAM = tuple(
    Fault(
        symptom=Symptom.MISSING,
        since=since,
        until=until,
        cause=f"{_FLAG}; or it was read as a stream, and pieces that wait for each other are merged without "
        "the routes: fixed in 0.31.0, use RequestOutputKind.FINAL_ONLY before",
    )
    for since, until in ((FIRST, "0.21.0"), ("0.22.0", "0.31.0"))
)
_SERVER = Fault(
    symptom=Symptom.MISSING,
    since="0.22.0",
    cause=f"{_FLAG}, or it is vLLM's Rust front end, which never returns routes",
)


def faults(*, http: bool, stop_string: bool) -> tuple[Fault, ...]:
    """What can be wrong with one completion's routes, by the way it came and how it ended."""
    particular = [_STOP_STRING] if stop_string else []
    particular += [_NO_HTTP, _SERVER] if http else _MERGED_STREAM
    return (*particular, *FAULTS)


def drops_at_stop_string(version: str) -> bool:
    """Does this release give no routes for a completion that a stop string ended?"""
    return _STOP_STRING.in_release(version)


def tells_release(version: Any) -> bool:
    """Can one say which release this is? Not of «nightly», nor of the «0.1.dev123+g1a2b3c» that a build from
    a clone without tags calls itself."""
    return isinstance(version, str) and re.match(r"v?\d+\.\d+(?!\d*\.dev)", version) is not None
