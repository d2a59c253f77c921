"""A small model that answers as vLLM and SGLang do: in process, over HTTP, and as a module called vllm."""

from __future__ import annotations

import base64
import functools
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

import npu_replay
from examples.qwen3_moe.model import qwen3_moe
from json_server import serving
from vllm_outputs import npy

SAMPLED = 24


class Engine:
    """A small Qwen3-MoE that says which experts it used, as an engine would: none for the last token."""

    def __init__(self) -> None:
        self.model = qwen3_moe(
            0,
            torch.device("cpu"),
            num_hidden_layers=8,
            mlp_only_layers=[0],
            max_position_embeddings=256,
        )

    def run(self, prompt: list[int]) -> tuple[list[int], np.ndarray[Any, Any]]:
        """Tokens that it «samples», and [tokens - 1, layers, top-k]."""
        sampled = [(sum(prompt) + 31 * number) % 512 for number in range(SAMPLED)]
        with torch.inference_mode(), npu_replay.record(self.model) as recording:
            self.model(torch.tensor([prompt + sampled]))
        (routes,) = recording.routes
        rows = np.zeros((len(prompt) + SAMPLED - 1, 8, routes.topk), np.uint8)
        rows[:, list(routes.layers)] = routes.ids.numpy()[:-1]
        return sampled, rows

    def completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        """vLLM's /v1/completions."""
        sampled, rows = self.run(asked["prompt"])
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None}
        if asked.get("return_token_ids"):
            choice |= {"prompt_token_ids": asked["prompt"], "token_ids": sampled}
        return {"id": "cmpl-1", "choices": [choice | {"routed_experts": npy(rows)}]}

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        """SGLang's /generate."""
        sampled, rows = self.run(asked["input_ids"])
        info = {
            "id": "1",
            "finish_reason": {"type": "length", "length": SAMPLED},
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": SAMPLED,
        }
        if asked.get("return_routed_experts"):
            info["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return {"text": "", "output_ids": sampled, "meta_info": info}

    def as_vllm(self) -> ModuleType:
        """A module with the names of vLLM that examples use, also between a rollout and its training."""
        module: Any = ModuleType("vllm")
        module.__version__ = "0.30.0"
        module.SamplingParams = SimpleNamespace
        module.LLM = lambda *_, **planned: SimpleNamespace(
            generate=functools.partial(self._generate, planned),
            sleep=lambda level=1: None,
            wake_up=lambda: None,
            reset_prefix_cache=lambda: None,
        )
        return module  # type: ignore[no-any-return]

    def _generate(self, planned: dict[str, Any], prompts: list[str], sampling: Any) -> list[Any]:
        assert planned["enable_return_routed_experts"], "without it vLLM gives no routes"
        return [self._output([ord(letter) for letter in prompt], sampling) for prompt in prompts]

    def _output(self, prompt: list[int], sampling: Any) -> Any:
        sampled, rows = self.run(prompt)
        rows.flags.writeable = False  # as vLLM's are
        fields = {
            "token_ids": sampled,
            "routed_experts": rows,
            "finish_reason": "length",
            "stop_reason": None,
        }
        outputs = [SimpleNamespace(index=number, **fields) for number in range(getattr(sampling, "n", 1))]
        return SimpleNamespace(request_id="0", prompt_token_ids=prompt, outputs=outputs, finished=True)


def served(engine: Engine) -> AbstractContextManager[str]:
    """The address of a server that answers as vLLM's and SGLang's do."""
    answers = {"/v1/completions": engine.completions, "/generate": engine.generate}
    return serving(lambda path, asked: answers[path](asked))
