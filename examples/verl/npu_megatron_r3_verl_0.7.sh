#!/usr/bin/env bash
# R3, Megatron under MindSpeed, NPU: the latest image of CANN 8.5.0 (vllm-ascend 0.18) with verl 0.7.1.
# Not run on an NPU: composed with each release's config, and the rest on CPUs (docs/dev/tried.md).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run grpo_trainer/run_qwen3moe-30b_grpo_megatron_vllm_npu.sh megatron_r3_verl_0.7 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.no_async_scheduling=True \
    "+ray_kwargs.ray_init.runtime_env.env_vars.NPU_REPLAY_VLLM_ASCEND='1'" "$@"
