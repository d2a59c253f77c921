"""One process of a job of two: verl's engine for an NPU, which repatches MindSpeed as it is made."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

ENGINE = "mindspeed.transformer_impl.MindspeedEngineWithLMHead"


def main(task: dict[str, Any]) -> dict[str, Any]:
    os.environ["NPU_REPLAY_MAX_LIVE_MISMATCH"] = "1"  # the routes are such as no router would choose
    import npu_replay
    import transformers_4
    from on_mindspeed.processes import triton_at_import

    transformers_4.lend()
    with triton_at_import():
        import mindspeed.megatron_adaptor as adaptor

    import torch.distributed as dist

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
    return {"done": task["cases"], "repatched": len(repatched), "mindspeed": adaptor.__file__}
