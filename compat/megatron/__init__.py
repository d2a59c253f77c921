"""Megatron-core, every release."""
