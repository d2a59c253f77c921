"""verl under MindSpeed: its functions, and the engine that it takes on an NPU."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

ENGINE = "mindspeed.transformer_impl.MindspeedEngineWithLMHead"


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
