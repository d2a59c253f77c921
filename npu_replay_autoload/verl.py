"""The entry point of verl from 0.9 on, which imports this module in each of its processes."""

import npu_replay_autoload

npu_replay_autoload.load("verl")
