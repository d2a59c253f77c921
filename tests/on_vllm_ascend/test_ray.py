"""vLLM's Ray executor gives its workers the switch: it takes along no variable that it isn't told of."""

from __future__ import annotations

import pytest

from npu_replay.compat.vllm_ascend import plugin


def test_the_ray_executor_takes_the_switch_along(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
    assert "NPU_REPLAY_VLLM_ASCEND" not in get_env_vars_to_copy()
    plugin._tell_workers_of_ray()
    assert {"NPU_REPLAY_VLLM_ASCEND", "NPU_REPLAY_STRICT"} <= get_env_vars_to_copy()
