"""A small Qwen3-VL-MoE of random weights, and samples of it: the same words about other images."""

from __future__ import annotations

from typing import Any

import torch

EXPERTS = 8
TOPK = 2
LAYERS = 4
IMAGE = 190
VIDEO = 191
BEGIN = 192
END = 193
Sample = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Token ids, and what belongs to them."""


def make(seed: int = 0) -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "moe_intermediate_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 200,
        "head_dim": 8,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
    }
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return Qwen3VLMoeForConditionalGeneration(config).train()


def sample(*seeds: int, grid: tuple[int, int] = (4, 4), video: bool = False, words: int = 7) -> Sample:
    """The same question about an image (a video of two frames) for each seed; about none without seeds."""
    height, width = grid
    kind, patches = ("_videos", "video_grid_thw") if video else ("", "image_grid_thw")
    special = [BEGIN, *[VIDEO if video else IMAGE] * (height * width // 4), END]
    shown = [*special, *special] if video else special  # a run of placeholders for each frame
    ids = torch.tensor([5, *shown * len(seeds), words, 8, 11, 12])
    rows = height * width * (2 if video else 1)
    pixels = [torch.randn(rows, 96, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    if not seeds:
        return ids, {}
    grids = torch.tensor([[2 if video else 1, height, width]] * len(seeds))
    return ids, {f"pixel_values{kind}": torch.cat(pixels), patches: grids}


def call(*samples: Sample, left: int = 0) -> dict[str, torch.Tensor]:
    """What the model is called with: padded on the left, images one after the other."""
    width = left + max(len(ids) for ids, _ in samples)
    ids, mask = torch.zeros(2, len(samples), width, dtype=torch.int64)
    for row, (tokens, _) in enumerate(samples):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    names = dict.fromkeys(name for _, inputs in samples for name in inputs)
    joined = {name: torch.cat([inputs[name] for _, inputs in samples if name in inputs]) for name in names}
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds, **joined}
