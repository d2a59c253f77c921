#!/usr/bin/env bash
# R3, Megatron under MindSpeed, NPU: images CANN 9.0.0 (verl 0.8.0) and 9.1.0 (verl 0.9), with vLLM for the
# example's SGLang.
# no_async_scheduling: for the vllm-ascend 0.18 of CANN 9.0.0; take it out with 0.23 and later.
# Not run on an NPU: composed with each release's config, and the rest on CPUs (docs/dev/tried.md).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run ascend_extras/grpo_trainer/run_qwen3_30b_a3b_megatron.sh megatron_r3 actor_rollout_ref.rollout.name=vllm \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.no_async_scheduling=True \
    "+ray_kwargs.ray_init.runtime_env.env_vars.NPU_REPLAY_VLLM_ASCEND='1'" "$@"
