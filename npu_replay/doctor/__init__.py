"""What is wrong with an installation: `npu-replay doctor` and `npu_replay.report`."""
