"""The head of each module that changes a product says what it asks for, what it changes, how it is undone."""

from __future__ import annotations

import importlib

import pytest

SHIMS = (
    *("patching.import_hook", "megatron.aux_losses", "megatron.config_flags", "megatron.fused_router"),
    *("megatron_backports.moe_utils", "megatron_backports.router_init", "megatron_backports.router_replay"),
    *("megatron.hybrid", "mindspeed.features", "mindspeed.llm"),
    *("mindspeed.fb_overlap", "mindspeed.repatch", "sglang.old_path"),
    *("vllm_ascend.plugin", "vllm_ascend.read_out", "vllm_ascend.seams"),
    *("verl.install", "verl.fsdp", "verl.config", "verl.agent_loop"),
    *("roll.pipeline", "roll.strategy", "slime.routing_replay", "swift"),
)


@pytest.mark.parametrize("shim", SHIMS)
def test_a_shims_head_says_what_it_asks_for_what_it_changes_and_how_it_is_undone(shim: str) -> None:
    head = importlib.import_module(f"npu_replay.compat.{shim}").__doc__ or ""
    places = [head.find(f"\n{word}:") for word in ("Asks", "Changes", "Undone")]
    assert -1 not in places
    assert places == sorted(places)
