"""Adds routing replay to ROLL's fsdp2 strategy; ROLL itself has it on Megatron alone."""
