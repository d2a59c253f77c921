"""Connects npu_replay to verl on Megatron-core, MindSpeed and FSDP."""
