"""Implements `npu-replay inspect` and `npu-replay compare`."""
