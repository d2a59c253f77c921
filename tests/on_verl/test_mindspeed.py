"""verl on MindSpeed: the stand-in always, a real one with `-m mindspeed` and its Megatron-LM on the path."""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from importlib.metadata import version
from typing import Any
from unittest.mock import Mock

import pytest

from on_mindspeed import processes

pytestmark = pytest.mark.megatron

ENGINE = "mindspeed.transformer_impl.MindspeedEngineWithLMHead"
CASES = ["R2: full recompute", "R3: pp2, two virtual stages and a dense chunk"]


@pytest.fixture(params=[processes.STAND_IN, pytest.param(processes.REAL, marks=pytest.mark.mindspeed)])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == processes.REAL and not processes.real_mindspeed():
        pytest.skip("mindspeed is not importable: put MindSpeed and Megatron-LM's source tree on PYTHONPATH")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    return str(request.param)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_engine_that_verl_takes_on_an_npu_records_and_replays(product: str) -> None:
    """MindspeedEngineWithLMHead, in two processes: the actor's repatches, and then another one's, which
    throws away what lies over MindSpeed's own wrappers."""
    if version("verl").startswith("0.8"):
        pytest.skip("0.8's is between 0.7.1's and 0.9's, which run here")
    target = "on_verl.test_mindspeed:engine"
    before = "on_verl.test_mindspeed:prepare"
    for answer in processes.run_ranks(product, target, {"cases": CASES}, 2, timeout=280, before=before):
        assert answer["repatched"] == 3, "the two engines of R2's case, and R3's"
        assert ("stand_in" in answer["mindspeed"]) == (product == processes.STAND_IN)


# In the processes


def prepare(task: dict[str, Any]) -> None:
    """Import MindSpeed, Megatron and verl's engine, in the process whose forks are the ranks."""
    # The routes are such as no router would choose.
    os.environ |= {"NPU_REPLAY_MIN_OVERLAP": "0", "TORCHDYNAMO_DISABLE": "1"}
    import npu_replay  # MindSpeed is imported before Megatron
    from on_mindspeed.processes import lent_at_import

    with lent_at_import():
        import mindspeed.megatron_adaptor as adaptor
    adaptor.repatch = Mock(wraps=adaptor.repatch)  # verl's engine takes it from there when it is imported
    with npu_replay.compat.cpu.lend():
        from on_verl import engine_job

        for name in ("on_verl.engine_cases", "verl.workers.engine_workers"):
            importlib.import_module(name)
        engine_job.prepare()
        engine_job.register(ENGINE)


def engine(task: dict[str, Any]) -> dict[str, Any]:
    """One process of a job of two: each engine repatches MindSpeed as it is made."""
    if "mindspeed" not in sys.modules:  # a new interpreter
        prepare(task)
    import torch.distributed as dist

    import npu_replay
    from on_verl import engine_cases

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with npu_replay.compat.cpu.lend():
        for name in task["cases"]:
            engine_cases.CASES[name]()
    dist.destroy_process_group()
    adaptor: Any = sys.modules["mindspeed.megatron_adaptor"]
    return {"repatched": adaptor.repatch.call_count, "mindspeed": adaptor.__file__}
