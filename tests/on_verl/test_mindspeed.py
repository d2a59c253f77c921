"""verl on MindSpeed: the stand-in always, a real one with `-m mindspeed` and its Megatron-LM on the path."""

from __future__ import annotations

import os
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import pytest

from on_mindspeed import processes

pytestmark = pytest.mark.megatron

ENGINE = "mindspeed.transformer_impl.MindspeedEngineWithLMHead"
CASES = ["R2: full recompute", "R3: pp2, two virtual stages and a dense chunk"]
VARIANTS = ["groups_sigmoid_bias", "capacity_probs"]


@pytest.fixture(params=[processes.STAND_IN, pytest.param(processes.REAL, marks=pytest.mark.mindspeed)])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == processes.REAL and not processes.real_mindspeed():
        pytest.skip("mindspeed is not importable: put MindSpeed and Megatron-LM's source tree on PYTHONPATH")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    return str(request.param)


@pytest.mark.newest
def test_record_and_replay_with_a_repatch_before_and_after(product: str) -> None:
    """A second engine repatches, which throws away what lies over MindSpeed's own wrappers."""
    found = processes.run(product, "on_verl.test_mindspeed:functions", {"cases": VARIANTS}, timeout=280)
    assert found["as before"]
    assert ("stand_in" in found["mindspeed"]) == (product == processes.STAND_IN)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_engine_that_verl_takes_on_an_npu_records_and_replays(product: str) -> None:
    """MindspeedEngineWithLMHead, in two processes: the actor's repatches, and then another one's."""
    if version("verl").startswith(("0.7.0", "0.8")):
        pytest.skip("0.7.0's engines know no replay, and 0.8's is between 0.7.1's and 0.9's, which run here")
    for found in processes.run_ranks(
        product, "on_verl.test_mindspeed:engine", {"cases": CASES}, 2, timeout=280
    ):
        assert found["repatched"] == 2 * len(CASES)
        assert ("stand_in" in found["mindspeed"]) == (product == processes.STAND_IN)


# In the processes


def _adaptor() -> Any:
    """MindSpeed is imported before Megatron."""
    import npu_replay  # noqa: F401
    import transformers_4
    from on_mindspeed.processes import triton_at_import

    transformers_4.lend()
    with triton_at_import():
        import mindspeed.megatron_adaptor as adaptor
    return adaptor


def functions(task: dict[str, Any]) -> dict[str, Any]:
    """repatch() before the first engine and before the second."""
    adaptor = _adaptor()
    import npu_replay

    adaptor.repatch({"use_flash_attn": False})
    with npu_replay.compat.cpu.lend():
        from npu_replay.smoke import megatron_model
        from verl_loop import Job, Verl, batches, compare_with_the_core

        megatron_model.start()
        verl = Verl()
        verl.patch.apply_router_replay_patch()
        for variant in task["cases"]:
            compare_with_the_core(verl, Job(variant, "full"), batches())
        first = Job("groups_sigmoid_bias", "full", seed=1)
        before = [first.forward(sequences).item() for sequences in batches()]
        adaptor.repatch({"use_flash_attn": False})  # as the next engine does, before it applies its patch
        verl.patch.apply_router_replay_patch()
        compare_with_the_core(verl, Job("groups_sigmoid_bias", "full"), batches())
        compare_with_the_core(verl, first, batches())
        after = [first.forward(sequences).item() for sequences in batches()]
    return {"as before": before == after, "mindspeed": adaptor.__file__}


def engine(task: dict[str, Any]) -> dict[str, Any]:
    """One process of a job of two: each engine repatches MindSpeed as it is made."""
    # The routes are such as no router would choose.
    os.environ |= {"NPU_REPLAY_MIN_OVERLAP": "0", "TORCHDYNAMO_DISABLE": "1"}
    adaptor = _adaptor()
    import torch.distributed as dist

    import npu_replay

    repatched = []
    native = adaptor.repatch

    def repatch(changes: dict[str, Any]) -> None:
        repatched.append(dict(changes))
        native(changes)

    adaptor.repatch = repatch  # verl's engine takes it from there when it is imported
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with npu_replay.compat.cpu.lend():
        from on_verl import engine_cases, engine_job

        engine_job.prepare()
        engine_job.register(ENGINE)
        for name in task["cases"]:
            engine_cases.CASES[name]()
    dist.destroy_process_group()
    return {"repatched": len(repatched), "mindspeed": adaptor.__file__}
