"""`npu-replay bench`: what it costs."""
