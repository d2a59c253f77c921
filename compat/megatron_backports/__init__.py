"""What Megatron-core 0.12 to 0.15 lack of the API of replay that 0.16 has."""
