"""Knows the routes that each release of vllm-ascend returns, and captures where it returns none."""
