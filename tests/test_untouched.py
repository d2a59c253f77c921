"""Training with Megatron-core alone, to the last bit, in each state of npu_replay in a process: a job that
asks for no replay is untouched.

tests/on_verl has the same of verl's engines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from untouched import ABSENT, STATES, outcomes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

COUNTED = "an expert bias that counts rows"


def test_megatron_trains_as_without_the_package(tmp_path: Path) -> None:
    """Losses, gradients, expert biases and weights; and these would show what a wrapper changes."""
    states = {**STATES, "imported": {}, COUNTED: {"NPU_REPLAY_EXPERT_BIAS": "1"}}
    found = outcomes("untouched_megatron", tmp_path, states=states)
    counted = found.pop(COUNTED)
    for state, outcome in found.items():
        assert outcome == found[ABSENT], state
    if found[ABSENT]["masked"]:
        assert counted != found[ABSENT]
