"""A small Qwen3-MoE in transformers, in Megatron-core and in vLLM; the demo and the GRPO run share it."""
