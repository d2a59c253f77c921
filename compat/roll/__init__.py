"""ROLL: routing replay in its fsdp2 strategy, which ROLL itself has on Megatron alone."""
