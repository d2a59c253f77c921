"""What is measured of decoding: one sample's routes, from what an engine hands over to checked RoutedExperts.

Qwen3-30B-A3B's 48 layers, top-8 of 128. The yardstick is a plain copy of the same ids of one byte.
"""

from __future__ import annotations

import base64
import functools
import io
import tracemalloc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.timing import Way
from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array

TOKENS = 16_384
PROMPT = 4_096
MODEL = RoutedModel(layers=tuple(range(48)), num_layers=48, num_experts=128, topk=8)


def ways() -> list[Way]:
    """The ways to measure; the plain copy comes first."""
    one = sample()
    return [
        Way("plain copy", one.rows.copy),
        Way("vLLM, array of uint8", lambda: from_vllm(one.in_process, MODEL)),
        Way("vLLM, base64 of .npy", lambda: from_vllm(one.answer, MODEL)),
        Way(
            "SGLang, base64 of int32",
            lambda: from_sglang(one.meta_info, MODEL, prompt_token_ids=one.prompt, output_ids=one.output),
        ),
        Way("base64 alone", lambda: base64.b64decode(one.text)),
    ]


def sizes(microseconds: dict[str, float]) -> str:
    """Speed by way, and the most memory that decoding takes beside the engine's answer, in words."""
    ids = sample().rows.size
    speeds = [f"{way} {ids / spent / 1e3:.2f}" for way, spent in microseconds.items() if spent]
    peaks = [f"{way.name} {_peak(way) / ids:.2f} x" for way in ways()[1:3]]
    return (
        f"{TOKENS:,} tokens, {MODEL.num_layers} layers, top-{MODEL.topk} of {MODEL.num_experts}; "
        f"10^9 ids a second: {', '.join(speeds)}\n"
        f"memory beside the answer, of one byte an id: {', '.join(peaks)}"
    )


def _peak(way: Way) -> int:
    way.run()  # what is kept between calls doesn't count
    tracemalloc.start()
    way.run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@dataclass(frozen=True)
class Sample:
    """One sample, as the engines hand it over: in_process and answer are vLLM's, meta_info SGLang's.

    Attributes:
        rows: uint8 [TOKENS - 1, layers, topk].
        text: base64 of the rows' .npy.
    """

    rows: Array
    prompt: list[int]
    output: list[int]
    text: str
    in_process: Any
    answer: dict[str, Any]
    meta_info: dict[str, Any]


@functools.cache
def sample() -> Sample:
    """The sample, made once."""
    generator = np.random.default_rng(0)
    some = np.argsort(generator.random((4096, MODEL.num_experts)), axis=1)[:, : MODEL.topk].astype(np.uint8)
    rows = some[generator.integers(0, len(some), (TOKENS - 1, MODEL.num_layers))]
    tokens = generator.integers(0, 150_000, TOKENS).tolist()
    prompt = tokens[:PROMPT]
    output = tokens[PROMPT:]
    npy = io.BytesIO()
    np.save(npy, rows)
    text = base64.b64encode(npy.getvalue()).decode()
    ints = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
    choice = {"index": 0, "token_ids": output, "routed_experts": text, "finish_reason": "length"}
    completion = SimpleNamespace(**choice | {"routed_experts": rows, "stop_reason": None})
    return Sample(
        rows=rows,
        prompt=prompt,
        output=output,
        text=text,
        in_process=SimpleNamespace(
            request_id="bench", prompt_token_ids=prompt, outputs=[completion], finished=True
        ),
        answer={"id": "bench", "choices": [choice | {"prompt_token_ids": prompt}]},
        meta_info={"id": "bench", "routed_experts": ints, "finish_reason": {"type": "length"}},
    )
