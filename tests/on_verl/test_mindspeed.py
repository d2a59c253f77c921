"""verl on MindSpeed: the stand-in always, a real one with `-m mindspeed` and its Megatron-LM on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "on_mindspeed"))

import processes

pytestmark = pytest.mark.megatron

VARIANTS = ["softmax_after_topk", "groups_sigmoid_bias", "aux_loss", "seq_aux_loss", "capacity_probs"]


@pytest.mark.parametrize(
    "product", [processes.STAND_IN, pytest.param(processes.REAL, marks=pytest.mark.mindspeed)]
)
def test_record_and_replay_with_a_repatch_before_and_after(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine repatches, which throws away what lies over MindSpeed's own wrappers."""
    if product == processes.REAL and not processes.real_mindspeed():
        pytest.skip("mindspeed is not importable: put MindSpeed and Megatron-LM's source tree on PYTHONPATH")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    found = processes.run(
        product, Path(__file__).with_name("mindspeed_worker.py"), {"variants": VARIANTS}, timeout=280
    )
    assert found["done"] == VARIANTS
    assert found["first engine"]
    assert ("stand_in" in found["mindspeed"]) == (product == processes.STAND_IN)
