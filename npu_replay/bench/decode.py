"""What is measured of decoding: one sample's routes, from what an engine hands over to checked RoutedExperts.

Qwen3-30B-A3B's 48 layers, top-8 of 128. The yardstick is a plain copy of the same ids of one byte.
"""

from __future__ import annotations

import base64
import functools
import io
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array

TOKENS, PROMPT = 16_384, 4_096
MODEL = RoutedModel(layers=tuple(range(48)), num_layers=48, num_experts=128, topk=8)


def ways() -> dict[str, Callable[[], object]]:
    """The ways to measure, by name; the plain copy comes first."""
    sample = _sample()
    return {
        "plain copy": lambda: sample.rows.copy(),
        "vLLM, array of uint8": lambda: from_vllm(sample.in_process, MODEL),
        "vLLM, base64 of .npy": lambda: from_vllm(sample.answer, MODEL),
        "SGLang, base64 of int32": lambda: from_sglang(
            sample.meta_info, MODEL, prompt_token_ids=sample.prompt, output_ids=sample.output
        ),
        "base64 alone": lambda: base64.b64decode(sample.text),
    }


def sizes(microseconds: dict[str, float]) -> str:
    """Speed by way, and the most memory that decoding takes beside the engine's answer, in words."""
    ids = _sample().rows.size
    speeds = [f"{way} {ids / spent / 1e3:.2f}" for way, spent in microseconds.items() if spent]
    return (
        f"decode: {TOKENS:,} tokens, {MODEL.num_layers} layers, top-{MODEL.topk} of {MODEL.num_experts}; "
        f"10^9 ids a second: {', '.join(speeds)}\n"
        f"memory beside the answer, of one byte an id: {', '.join(_peaks())}"
    )


def _peaks() -> Iterator[str]:
    ids = _sample().rows.nbytes
    for name in ("vLLM, array of uint8", "vLLM, base64 of .npy"):
        run = ways()[name]
        run()  # what is kept between calls doesn't count
        tracemalloc.start()
        run()
        yield f"{name} {tracemalloc.get_traced_memory()[1] / ids:.2f} x"
        tracemalloc.stop()


@dataclass(frozen=True)
class _Sample:
    rows: Array
    prompt: list[int]
    output: list[int]
    text: str
    answer: dict[str, Any]
    meta_info: dict[str, Any]

    @property
    def in_process(self) -> Any:
        completion = SimpleNamespace(
            index=0, token_ids=self.output, routed_experts=self.rows, finish_reason="length", stop_reason=None
        )
        return SimpleNamespace(
            request_id="bench", prompt_token_ids=self.prompt, outputs=[completion], finished=True
        )


@functools.cache
def _sample() -> _Sample:
    generator = np.random.default_rng(0)
    some = np.argsort(generator.random((4096, MODEL.num_experts)), axis=1)[:, : MODEL.topk].astype(np.uint8)
    rows = some[generator.integers(0, len(some), (TOKENS - 1, MODEL.num_layers))]
    tokens = generator.integers(0, 150_000, TOKENS).tolist()
    prompt, output = tokens[:PROMPT], tokens[PROMPT:]
    npy = io.BytesIO()
    np.save(npy, rows)
    text = base64.b64encode(npy.getvalue()).decode()
    choice = {"index": 0, "token_ids": output, "routed_experts": text, "finish_reason": "length"}
    ints = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
    return _Sample(
        rows=rows,
        prompt=prompt,
        output=output,
        text=text,
        answer={"id": "bench", "choices": [choice | {"prompt_token_ids": prompt}]},
        meta_info={"id": "bench", "routed_experts": ints, "finish_reason": {"type": "length"}},
    )
