"""What a file or an answer holds: `npu-replay inspect` and `npu-replay compare`."""
