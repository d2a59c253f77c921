"""The models of the tests: one file a family, and in `outcome.py` what all of them are compared by.

toys: plain torch, also called with token ids. hugging_face: transformers' families. qwen, qwen_vl,
qwen_sharded: Qwen3-MoE for jobs inside frameworks, with images, and in shards. gpt, gpt_split, hybrid:
Megatron's GPTModel whole and cut over ranks, and its HybridModel.
"""
