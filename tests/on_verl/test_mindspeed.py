"""verl on MindSpeed: the stand-in always, a real one with `-m mindspeed` and its Megatron-LM on the path."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from on_mindspeed import processes

pytestmark = pytest.mark.megatron

CASES = ["R2: full recompute", "R3: pp2, two virtual stages and a dense chunk"]
VARIANTS = ["softmax_after_topk", "groups_sigmoid_bias", "aux_loss", "seq_aux_loss", "capacity_probs"]


@pytest.fixture(params=[processes.STAND_IN, pytest.param(processes.REAL, marks=pytest.mark.mindspeed)])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == processes.REAL and not processes.real_mindspeed():
        pytest.skip("mindspeed is not importable: put MindSpeed and Megatron-LM's source tree on PYTHONPATH")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    return str(request.param)


@pytest.mark.newest
def test_record_and_replay_with_a_repatch_before_and_after(product: str) -> None:
    """A second engine repatches, which throws away what lies over MindSpeed's own wrappers."""
    found = processes.run(product, "on_verl.mindspeed_worker:functions", {"cases": VARIANTS}, timeout=280)
    assert found["as before"]
    assert ("stand_in" in found["mindspeed"]) == (product == processes.STAND_IN)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_engine_that_verl_takes_on_an_npu_records_and_replays(product: str) -> None:
    """MindspeedEngineWithLMHead, in two processes: the actor's repatches, and then another one's."""
    if version("verl").startswith(("0.7.0", "0.8")):
        pytest.skip("0.7.0's engines know no replay, and 0.8's is between 0.7.1's and 0.9's, which run here")
    for found in processes.run_ranks(
        product, "on_verl.mindspeed_worker:engine", {"cases": CASES}, 2, timeout=280
    ):
        assert found["repatched"] == 2 * len(CASES)
        assert ("stand_in" in found["mindspeed"]) == (product == processes.STAND_IN)
