"""verl on Megatron-core and MindSpeed."""
