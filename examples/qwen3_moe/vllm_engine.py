"""vLLM in this process: sequences with the experts that it used, and new weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from examples.qwen3_moe.sample import Sample
from npu_replay import RoutedModel, from_vllm
from npu_replay.compat.vllm import engine_arguments
from npu_replay.rollout.release_rules import release

PLANNED: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "worker_extension_cls": f"{__name__}.NewWeights",
}


class NewWeights:
    """What vLLM's workers are taught: weights out of a folder, while the engine runs."""

    model_runner: Any

    def take_weights(self, folder: str) -> None:
        import vllm

        self.model_runner.reload_weights(weights_path=folder)
        if release(vllm.__version__) < (0, 30, 0):
            return
        # vLLM 0.30 and 0.32 pack their CPU kernels' experts when they are loaded first, and then never again
        # (unquantized_fused_moe_method.py, `is_weight_update`): the kernel would read the new ones wrongly.
        for layer in self.model_runner.model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and layer.w13_weight.device.type == "cpu":
                kernel.fused_experts.process_weights_after_loading(layer)


class Vllm:
    """A live engine.

    Args:
        folder: a model as transformers saves it.
        planned: further arguments of vLLM's `LLM`.

    Attributes:
        version: how often weights have come since the start.
    """

    def __init__(self, folder: str, **planned: Any) -> None:
        import vllm

        arguments = engine_arguments(
            vllm.__version__, planned=PLANNED | planned | {"model": folder}, model=folder
        )
        os.environ.update(arguments.environment)
        self._llm: Any = vllm.LLM(**arguments.arguments)
        self._model = RoutedModel.from_config(folder)
        self.version = 0

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        each: int = 1,
        longest: int | Sequence[int],
        temperature: float = 1.0,
    ) -> list[Sample]:
        """Sequences of these prompts, `each` of a prompt, those of one prompt in a row.

        Args:
            longest: how many tokens are sampled at most, of all prompts or of each.
            temperature: 0 takes the likeliest token.
        """
        from vllm import SamplingParams

        limits = [longest] * len(prompts) if isinstance(longest, int) else longest
        asked = [
            SamplingParams(n=each, max_tokens=limit, temperature=temperature, logprobs=0) for limit in limits
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False
        )
        return [
            Sample(
                tokens=torch.tensor([*output.prompt_token_ids, *completion.token_ids]),
                prompt=len(output.prompt_token_ids),
                log_probs=torch.tensor(
                    [
                        step[token].logprob
                        for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
                    ]
                ),
                routes=routes,
            )
            for output in outputs
            for completion, routes in zip(
                output.outputs, from_vllm(output, self._model, weight_version=self.version), strict=True
            )
        ]

    def load(self, folder: str) -> int:
        """Take the weights of another folder, and forget what the older ones had cached: rows too.

        Returns:
            The new `version`.
        """
        self._llm.collective_rpc("take_weights", args=(folder,))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache can't be reset: a request still runs")
        self.version += 1
        return self.version


SHAPE: dict[str, Any] = {"num_attention_heads": 4, "head_dim": 32}
"""What the config of `qwen3_moe` has to have for vLLM on a CPU."""
