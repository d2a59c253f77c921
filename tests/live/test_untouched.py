"""vLLM's answers, to the last bit, in each state of npu_replay in a process whose plug-ins vLLM loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from untouched import ABSENT, outcomes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_vllm_answers_as_without_the_package(saved: Any, tmp_path: Path) -> None:
    _, folder = saved("Qwen3Moe")
    found = outcomes("live.untouched_vllm", tmp_path, imports=["vllm"], model=str(folder))
    for state, outcome in found.items():
        assert outcome == found[ABSENT], state
