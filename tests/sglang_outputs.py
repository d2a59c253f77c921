"""What each release of SGLang hands out, made from the true rows of a sequence.

Read off its released sources: what the detokenizer and the tokenizer manager put into meta_info, and the
OpenAI endpoints into sglext. A release is a version; the functions ask `release` what it does.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import release
from npu_replay.routes.checks import Array

RELEASES = (
    *("0.5.7", "0.5.8", "0.5.8.post1", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1"),
    *("0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19"),
    *("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
"""All that return routes."""


def true_rows(model: RoutedModel, tokens: int, seed: int = 0) -> Array:
    """Rows as a capturer holds them, [tokens, all decoder layers, topk] int32: zeros in dense layers."""
    scores = np.random.default_rng(seed).random((tokens, model.num_layers, model.num_experts))
    rows = np.argsort(scores, axis=2)[:, :, : model.topk].astype(np.int32)
    rows[:, list(model.dense)] = 0
    return rows


@dataclass
class Request:
    """One request that has ended.

    Attributes:
        version: the release that served it.
        prompt, output: its tokens.
        rows: [tokens - 1, layers, topk] int32, and more where the engine ran past the end.
        asked_from: its routed_experts_start_len.
        finish: how it ended.
        retractions: how often it was put back.
        weights: (version, first output token) of each weights that sampled for it.
        captured: False for a request that was aborted before its prefill.
    """

    version: str
    prompt: list[int]
    output: list[int]
    rows: Array
    asked_from: int = 0
    finish: str = "length"
    retractions: int = 0
    weights: list[tuple[str, int]] = field(default_factory=lambda: [("default", 0)])
    captured: bool = True
    id: str = "3f9d"

    def since(self, version: str) -> bool:
        return release(self.version) >= release(version)

    def collected(self) -> torch.Tensor | None:
        """What the scheduler collects: by the tokens it ran, from the start if the release honours it."""
        if not self.captured:
            return None
        start = min(self.asked_from, len(self.rows)) if self.since("0.5.12") else 0
        end = len(self.prompt) + len(self.output) - 1 if self.since("0.5.13") else len(self.rows)
        return torch.from_numpy(self.rows[start:end].astype(np.int32))

    def meta_info(self, skip_tokenizer_init: bool = False) -> dict[str, Any]:
        retractions = "num_retractions" if self.since("0.5.12") else "total_retractions"
        if self.finish == "abort":
            finish: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None}
        elif self.finish == "stop":
            finish = {"type": "stop", "matched": self.output[-1]}
        else:
            finish = {"type": "length", "length": len(self.output)}
        info = {
            "id": self.id,
            "finish_reason": finish,
            "prompt_tokens": len(self.prompt),
            "weight_version": self.weights[-1][0],
            retractions: self.retractions,
            "completion_tokens": len(self.output),
            "cached_tokens": 0,
        }
        if self.since("0.5.19"):
            info["weight_versions"] = self._spans()
        collected = self.collected()
        if collected is None:
            # until 0.5.8 the detokenizer makes a list of what isn't there; from 0.5.10 on it is left out
            if not self.since("0.5.10"):
                info["routed_experts"] = None if skip_tokenizer_init or self.since("0.5.9") else []
        elif skip_tokenizer_init and not self.since("0.5.10"):
            info["routed_experts"] = collected
        else:
            info["routed_experts"] = base64.b64encode(collected.numpy().tobytes()).decode("utf-8")
        info["e2e_latency"] = 0.25
        return info

    def _spans(self) -> list[dict[str, Any]]:
        ends = [first for _, first in self.weights[1:]] + [len(self.output)]
        return [
            {"version": version, "start": first, "end": end}
            for (version, first), end in zip(self.weights, ends, strict=True)
        ]

    def generate(self, skip_tokenizer_init: bool = False) -> dict[str, Any]:
        """The answer of /generate and of `Engine.generate`."""
        text = {} if skip_tokenizer_init else {"text": "..."}
        return {**text, "output_ids": list(self.output), "meta_info": self.meta_info(skip_tokenizer_init)}

    def openai(self, kind: str = "chat.completion", choices: int = 1, **extra: Any) -> dict[str, Any]:
        """The answer of an OpenAI endpoint: the routes lie beside the choices, the first one's alone."""
        info = self.meta_info()
        metadata = {"weight_version": info["weight_version"]}
        if self.since("0.5.19"):
            metadata["weight_versions"] = info["weight_versions"]
        body = {
            "id": self.id,
            "object": kind,
            "created": 1,
            "model": "moe",
            "choices": [self._choice(kind, index, **extra) for index in range(choices)],
            "usage": {
                "prompt_tokens": len(self.prompt),
                "completion_tokens": len(self.output) * choices,
                "total_tokens": len(self.prompt) + len(self.output) * choices,
            },
            "metadata": metadata,
        }
        if info.get("routed_experts") and not (extra.get("meta_info") and self.since("0.5.19")):
            body["sglext"] = {"routed_experts": info["routed_experts"]}
        return body

    def _choice(self, kind: str, index: int, **extra: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": "..."}
        choice = {
            "index": index,
            **({"message": message} if kind.startswith("chat") else {"text": "..."}),
            "logprobs": None,
            "finish_reason": self.finish,
            "matched_stop": None,
        }
        if extra.get("token_ids"):
            choice |= {"token_ids": list(self.output), "prompt_token_ids": list(self.prompt)}
        if extra.get("meta_info") and self.since("0.5.13"):
            choice["meta_info"] = self.meta_info()
        return choice
