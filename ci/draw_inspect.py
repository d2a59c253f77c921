"""Draws docs/images/inspect.png: `npu-replay inspect` on an answer that is right, and on one that is damaged.

The routes are those of a small model of transformers, over a prompt of 300 tokens and 100 more; they are put
into an answer as vLLM's server gives it. In the other answer 64 rows are lost, as engines lose them.

    PYTHONPATH=. python ci/draw_inspect.py FOLDER [PICTURE]    # writes the answers and config.json there
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import npu_replay
from examples.qwen3_moe.model import qwen3_moe

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "inspect.png"
PROMPT = 300
TOKENS = 400
LAYERS = 12


def main(folder: Path, picture: Path = PICTURE) -> int:
    """Write the answers, their config and the picture, and print what inspect says.

    Returns:
        How many of the answers are refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"num_hidden_layers": LAYERS, "mlp_only_layers": [0], "num_experts": 64}
    model = qwen3_moe(0, torch.device("cpu"), max_position_embeddings=TOKENS, **sizes)
    model.config.save_pretrained(folder)
    tokens = torch.randint(0, model.config.vocab_size, (TOKENS,))
    with torch.inference_mode(), npu_replay.record(model) as recording:
        model(tokens[None])
    (routes,) = recording.routes
    # A row for each token but the last, [tokens - 1, decoder layers, top-k].
    rows = np.zeros((TOKENS - 1, LAYERS, routes.topk), np.uint8)
    rows[:, list(routes.layers)] = routes.ids.numpy()[:-1]
    (folder / "answer.json").write_text(json.dumps(answer(tokens.tolist(), rows)))
    rows[:64] = 0
    (folder / "damaged.json").write_text(json.dumps(answer(tokens.tolist(), rows)))
    refused = 0
    for name, more in (("answer.json", ["--force", "--out", str(picture.absolute())]), ("damaged.json", [])):
        words = f"inspect {name} --config config.json --engine-version 0.23.0".split()
        command = [sys.executable, "-m", "npu_replay", *words, *more]
        refused += subprocess.run(command, cwd=folder, check=False).returncode
    return refused


def answer(tokens: list[int], rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """An answer of /v1/completions, with return_token_ids."""
    buffer = io.BytesIO()
    np.save(buffer, rows)
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_token_ids": tokens[:PROMPT],
        "token_ids": tokens[PROMPT:],
        "routed_experts": base64.b64encode(buffer.getvalue()).decode(),
    }
    return {"id": "cmpl-17", "object": "text_completion", "choices": [choice]}


if __name__ == "__main__":
    raise SystemExit(main(*map(Path, sys.argv[1:])))
