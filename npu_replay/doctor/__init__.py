"""What is wrong with an installation: `npu-replay doctor` and `npu_replay.report`."""

ABOUT = "Say whether replay works here, and what to do if it doesn't (then exits 1)."
