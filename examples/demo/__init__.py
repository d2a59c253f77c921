"""The whole job on real parts: a rollout by transformers or vLLM, a trainer in Megatron-core."""
