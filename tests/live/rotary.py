"""Lends vLLM 0.30 rotary embeddings that are right for DeepSeek's shapes: its operator for CPUs isn't.

Imported it does that; run it does that and is vLLM's server, whose engine process is a fork of it: on a CPU
vLLM would start one anew, and import all again.
"""

import multiprocessing
import runpy

import vllm.v1.engine.utils
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native

if __name__ == "__main__":
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
