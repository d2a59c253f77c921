"""Finds faults of an installation: `npu-replay doctor` and `npu_replay.report`."""
