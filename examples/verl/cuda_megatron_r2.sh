#!/usr/bin/env bash
# R2, Megatron, CUDA: verl 0.8.0 and 0.9, in a verlai/verl image of that release.
# Not run on CUDA: composed with each release's config, and the rest on CPUs (docs/dev/verl.md).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run grpo_trainer/run_qwen3_30b_a3b_megatron.sh megatron_r2 "$@"
