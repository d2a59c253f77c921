#!/usr/bin/env bash
# R2, Megatron under MindSpeed, NPU: images CANN 8.5.0 with verl 0.7.1. R3: npu_megatron_r3_verl_0.7.sh, in the latest of them.
# Not run on an NPU: composed with each release's config, and the rest on CPUs (docs/dev/tried.md).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run grpo_trainer/run_qwen3moe-30b_grpo_megatron_vllm_npu.sh megatron_r2_verl_0.7 "$@"
