"""Implements `npu-replay smoke`, which tries routing replay on the user's own cluster."""
