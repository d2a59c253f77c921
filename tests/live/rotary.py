"""Lends vLLM 0.30 rotary embeddings that are right for DeepSeek's shapes: its operator for CPUs isn't.

Imported it does that; run it does that and is vLLM's server, whose engine process imports this file again.
"""

import runpy

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
