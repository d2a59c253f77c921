"""One process of a job of two: verl's engine for an NPU, which repatches MindSpeed as it is made."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "on_mindspeed"))

ENGINE = "mindspeed.transformer_impl.MindspeedEngineWithLMHead"


def main(task: dict[str, Any]) -> dict[str, Any]:
    rank, world = task["rank"], task["world"]
    # As torchrun sets them; verl's workers read them, and nobody connects there.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}"}
    os.environ["NPU_REPLAY_MAX_LIVE_MISMATCH"] = "1"  # the routes are such as no router would choose
    from processes import triton_at_import

    import npu_replay
    import transformers_4

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
    store = dist.FileStore(task["store"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    with npu_replay.compat.cpu.lend():
        import engine_cases
        import engine_job

        engine_job.prepare()
        engine_job.register(ENGINE)
        for name in task["cases"]:
            engine_cases.CASES[name]()
    dist.destroy_process_group()
    return {"done": task["cases"], "repatched": len(repatched), "mindspeed": adaptor.__file__}


if __name__ == "__main__":
    from processes import answer, read_task

    answer(main(read_task()))
