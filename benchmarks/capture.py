"""What is measured of the capture on vllm-ascend: a step of Qwen3-30B-A3B's 48 routers, alone and captured.

The routers' gate and top-k are all of the model that runs here, so what capture adds is as large as it gets;
its all_reduce of a step, which needs ranks, is counted in bytes.
"""

from __future__ import annotations

import torch

from benchmarks.timing import Way
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.placing import Layout
from npu_replay.compat.vllm_ascend.self_check import SelfCheck

TOKENS = 256
LAYERS = 48
HIDDEN = 2048
EXPERTS = 128
TOPK = 8


def ways(device: torch.device) -> list[Way]:
    """The ways to measure; the routers alone come first."""
    hidden = torch.randn(TOKENS, HIDDEN, device=device)
    gates = [torch.randn(EXPERTS, HIDDEN, device=device) for _ in range(LAYERS)]
    buffer = torch.zeros(8192, LAYERS, TOPK, dtype=torch.int32, device=device)
    check = SelfCheck(dict.fromkeys(range(LAYERS), ""), EXPERTS, None, "here", steps=0)
    capture = Capture(buffer, check, None)
    layout = Layout(comm="mc2", tokens=TOKENS, entered=TOKENS)

    def choose(layer: int) -> torch.Tensor:
        return (hidden @ gates[layer].T).softmax(-1).topk(TOPK).indices.int()

    def alone() -> None:
        for layer in range(LAYERS):
            choose(layer)

    def captured() -> None:
        capture.begin(TOKENS)
        for layer in range(LAYERS):
            capture.take(layer, choose(layer), None, layout)
        capture.finish()

    return [Way("routers alone", alone), Way("captured", captured)]


def sizes() -> str:
    """What a step adds, in words."""
    layer = TOKENS * TOPK * 4
    return (
        f"{TOKENS} tokens, {LAYERS} layers, top-{TOPK}: a layer, a copy of {layer:,} bytes; "
        f"a step, a fill and, over tensor-parallel ranks, an all_reduce of {LAYERS * layer:,} bytes"
    )
