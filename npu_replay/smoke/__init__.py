"""`npu-replay smoke`: proof on the user's own cluster."""
