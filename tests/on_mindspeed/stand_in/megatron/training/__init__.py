"""What of Megatron-LM's megatron.training a library meets; megatron-core's wheel has no such package.

`megatron` is a namespace package: this folder and the wheel's are one to Python.
"""
