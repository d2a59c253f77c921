"""A job of tests/untouched.py: vLLM answers some prompts in this process."""

from __future__ import annotations

import importlib
from typing import Any

PROMPTS = [[5, 6, 7, 8, 9], [300, 2, 45], [*range(100, 140)]]


def run(task: dict[str, Any], *, ask: bool) -> list[Any]:
    """The ids and log-probs of greedy answers; with `ask` of an engine that has given routes, uninstalled."""
    from vllm import LLM, SamplingParams

    from live.engine import SMALL  # the copy's

    more = {"enable_return_routed_experts": True} if ask else {}
    engine = LLM(task["model"], **SMALL, **more)
    how = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": one} for one in PROMPTS]
    if ask:
        npu_replay: Any = importlib.import_module("npu_replay")
        npu_replay.install()
        for answer in engine.generate(prompts, how, use_tqdm=False):
            assert npu_replay.from_vllm(answer, task["model"])
        npu_replay.uninstall()
        engine.reset_prefix_cache()
    found = []
    for answer in engine.generate(prompts, how, use_tqdm=False):
        (one,) = answer.outputs
        scores = [{token: score.logprob.hex() for token, score in each.items()} for each in one.logprobs]
        found.append([*one.token_ids, scores])
    return found
