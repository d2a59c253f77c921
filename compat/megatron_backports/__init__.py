"""Adds what Megatron-core 0.12 to 0.15 lack of the replay API of 0.16."""
