"""vllm-ascend: which release hands out which routes, and captures where it hands out none."""
