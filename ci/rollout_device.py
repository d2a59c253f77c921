"""One start of an engine on this machine: what it returns is decoded, checked, counted and timed.

    python ci/rollout_device.py MODEL OUT --mode eager|graph|off [--tp 2] [--against OUT]

`bash ci/device.sh --rollout MODEL` runs all three, each in a process of its own. On vllm-ascend npu_replay
captures, and its self-check holds the first steps against the routers' logits: a wrong row ends the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_replay import RoutedModel, from_vllm
from npu_replay.compat import probe
from npu_replay.compat.vllm import engine_arguments

PROMPTS = 32
PREFIX = 96
NEW = 128
"""Samples; tokens that all of them begin with, which the prefix cache then has; tokens that each gets."""
MAY_DIFFER = 0.3
"""The share of the prompts' token-layers that may differ between an eager start and one with graphs. Other
kernels sum in another order, and in bfloat16 that moves experts; rows of other tokens differ nearly all."""


def run(folder: Path, mode: str, tensor_parallel_size: int) -> tuple[dict[str, Any], np.ndarray]:
    """What is to be said of a start, and the ids of all prompts' rows."""
    planned: dict[str, Any] = {
        "model": str(folder),
        "tensor_parallel_size": tensor_parallel_size,
        "enable_expert_parallel": tensor_parallel_size > 1,
        "enforce_eager": mode == "eager",
        "max_model_len": 1024,
        "max_num_seqs": PROMPTS,
    }
    vllm = probe.installed("vllm")
    ascend = probe.installed("vllm-ascend")
    made = engine_arguments(vllm, planned=planned, vllm_ascend=ascend or None, capture=bool(ascend))
    os.environ.update(made.environment)
    arguments = dict(made.arguments)
    if mode == "off":
        arguments["enable_return_routed_experts"] = False

    from vllm import LLM, SamplingParams  # after the environment is set

    engine = LLM(**arguments)
    # Prompts that all begin alike, and end at other lengths.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    words = min(config.get("vocab_size") or config["text_config"]["vocab_size"], 30_000)
    random = np.random.default_rng(7)
    prefix = random.integers(3, words, PREFIX).tolist()
    prompts = [[*prefix, *random.integers(3, words, 8 + 12 * at).tolist()] for at in range(PROMPTS)]
    asked = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    engine.generate(requests[:2], asked)  # what is slow once
    started = time.perf_counter()
    outputs = engine.generate(requests, asked)
    seconds = time.perf_counter() - started
    report = {"vllm": vllm, "vllm_ascend": ascend, "mode": mode, "tp": tensor_parallel_size}
    report |= {"tokens_per_second": round(PROMPTS * NEW / seconds, 1)}
    if mode == "off":
        return report, np.empty(0, np.int32)
    routes = [from_vllm(output, folder)[0] for output in outputs]
    rows = [sample.ids.numpy()[: len(ids)] for sample, ids in zip(routes, prompts, strict=True)]
    report |= {"layers": len(routes[0].layers), "rows": sum(int(sample.recorded.sum()) for sample in routes)}
    return report, np.sort(np.concatenate(rows), axis=-1)


def main(arguments: Sequence[str]) -> int:
    """Run one start and write what was found; 1 if its rows differ too much from those it is held against."""
    parser = argparse.ArgumentParser(prog="ci/rollout_device.py")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mode", choices=("eager", "graph", "off"), required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--against", type=Path, help="the OUT of another start")
    args = parser.parse_args(arguments)
    known = RoutedModel.of(args.model)
    print(f"{len(known.layers)} layers of {known.num_experts} experts, {known.topk} a token", flush=True)
    report, rows = run(args.model, args.mode, args.tp)
    np.save(args.out.with_suffix(".npy"), rows)
    if args.against is not None:
        wrong = (rows != np.load(args.against.with_suffix(".npy"))).any(-1)
        report["differs_from_eager"] = round(float(wrong.mean()), 5)
    args.out.write_text(json.dumps(report), encoding="utf-8")
    print(json.dumps(report, indent=1))
    differ = report.get("differs_from_eager", 0)
    if differ > MAY_DIFFER:
        print(f"{differ:.1%} of the prompts' token-layers differ, above {MAY_DIFFER:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
