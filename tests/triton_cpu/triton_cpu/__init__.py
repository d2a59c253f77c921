"""Triton's back end for a machine without a device: with TRITON_INTERPRET=1 kernels run in numpy, slowly.

vLLM from 0.31.0 on wants Triton for its Model Runner V2, and returns routes by that alone. This folder on
PYTHONPATH is enough: docs/dev/tried.md has the commands.
"""
