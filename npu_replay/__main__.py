"""Runs `npu-replay` as `python -m npu_replay`."""

from npu_replay.cli import main

if __name__ == "__main__":
    main()
