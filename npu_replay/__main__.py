"""`python -m npu_replay` is `npu-replay`."""

from npu_replay.cli import main

if __name__ == "__main__":
    main()
