"""The entry point of vLLM, which calls `register` in each of its processes."""

import npu_replay_autoload


def register() -> None:
    """Capture routed experts on vllm-ascend where NPU_REPLAY_VLLM_ASCEND asks for it; else import nothing."""
    asked = npu_replay_autoload.word("NPU_REPLAY_VLLM_ASCEND")
    if asked in ("", *npu_replay_autoload.OFF) or not npu_replay_autoload.wanted():
        return
    from npu_replay.compat.vllm_ascend import plugin

    plugin.register()
