"""Connects npu_replay to Megatron-core, every release."""
