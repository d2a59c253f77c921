"""The whole job on real parts: a rollout by Hugging Face transformers, a trainer in Megatron-core."""
