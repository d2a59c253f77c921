"""The examples with a live vLLM: each by its own command, in a process of its own."""

from __future__ import annotations

import pytest

from shown_examples import ROOT, prints_what_it_promises


@pytest.mark.megatron
def test_r3_from_vllm_to_megatron() -> None:
    prints_what_it_promises(ROOT / "examples" / "vllm_to_megatron_r3.py")


def test_several_turns_with_a_tool() -> None:
    prints_what_it_promises(ROOT / "examples" / "multi_turn.py")
