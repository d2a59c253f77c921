#!/usr/bin/env bash
# R2, FSDP2, CUDA: verl 0.8.0 and 0.9, in a verlai/verl image of that release, with transformers 5.
# Not run on CUDA: composed with each release's config, and the rest on CPUs (docs/dev/verl.md).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run grpo_trainer/run_qwen3_30b_a3b_fsdp.sh fsdp2_r2 "$@"
