"""A small model that answers as vLLM and SGLang do: in process, over HTTP, and as a module called vllm."""

from __future__ import annotations

import base64
import io
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

import npu_replay
from examples.qwen3_moe.model import qwen3_moe
from json_server import serving

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
        buffer = io.BytesIO()
        np.save(buffer, rows)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None}
        if asked.get("return_token_ids"):
            choice |= {"prompt_token_ids": asked["prompt"], "token_ids": sampled}
        return {
            "id": "cmpl-1",
            "choices": [choice | {"routed_experts": base64.b64encode(buffer.getvalue()).decode()}],
        }

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

    def in_process(self, prompts: list[dict[str, Any]]) -> list[Any]:
        """LLM.generate of vLLM."""
        found = []
        for prompt in prompts:
            sampled, rows = self.run(prompt["prompt_token_ids"])
            rows.flags.writeable = False  # as vLLM's are
            one = SimpleNamespace(
                index=0, token_ids=sampled, routed_experts=rows, finish_reason="length", stop_reason=None
            )
            found.append(
                SimpleNamespace(
                    request_id="0", prompt_token_ids=prompt["prompt_token_ids"], outputs=[one], finished=True
                )
            )
        return found

    def as_vllm(self) -> ModuleType:
        """A module with the names of vLLM that examples use."""
        module: Any = ModuleType("vllm")
        module.__version__ = "0.30.0"
        module.SamplingParams = SimpleNamespace
        module.LLM = lambda *_, **said: SleepingEngine(self._generate(said))
        return module  # type: ignore[no-any-return]

    def _generate(self, said: dict[str, Any]) -> Any:
        def generate(prompts: list[str], sampling: Any) -> list[Any]:
            assert said["enable_return_routed_experts"], "without it vLLM gives no routes"
            ids = [{"prompt_token_ids": [ord(letter) for letter in prompt]} for prompt in prompts]
            found = self.in_process(ids)
            for one in found:
                first = one.outputs[0]
                count = getattr(sampling, "n", 1)
                one.outputs = [SimpleNamespace(**vars(first) | {"index": number}) for number in range(count)]
            return found

        return generate


class SleepingEngine:
    """vLLM's LLM, with what a colocated job calls between a rollout and its training."""

    def __init__(self, generate: Any) -> None:
        self._generate = generate
        self._is_asleep = False

    def generate(self, *args: Any) -> list[Any]:
        assert not self._is_asleep
        return self._generate(*args)  # type: ignore[no-any-return]

    def sleep(self, level: int = 1) -> None:
        self._is_asleep = True

    def wake_up(self) -> None:
        self._is_asleep = False

    def reset_prefix_cache(self) -> None:
        assert not self._is_asleep


def served(engine: Engine) -> AbstractContextManager[str]:
    """The address of a server that answers as vLLM's and SGLang's do."""
    answers = {"/v1/completions": engine.completions, "/generate": engine.generate}
    return serving(lambda path, asked: answers[path](asked))
