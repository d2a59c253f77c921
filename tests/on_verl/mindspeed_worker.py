"""verl's functions under MindSpeed: repatch() before the first engine and before the second."""

from __future__ import annotations

from typing import Any


def main(task: dict[str, Any]) -> dict[str, Any]:
    import npu_replay
    import transformers_4
    from on_mindspeed.processes import triton_at_import

    transformers_4.lend()

    with triton_at_import():
        import mindspeed.megatron_adaptor
    repatch = mindspeed.megatron_adaptor.repatch
    repatch({"use_flash_attn": False})
    with npu_replay.compat.cpu.lend():
        from npu_replay.demo import megatron_model
        from verl_loop import Job, Verl, batches, compare_with_the_core

        megatron_model.start()
        verl = Verl()
        verl.patch.apply_router_replay_patch()
        done = []
        for variant in task["variants"]:
            compare_with_the_core(verl, Job(variant, "full"), batches())
            done.append(variant)
        first = Job("groups_sigmoid_bias", "full", seed=1)
        before = [first.forward(sequences).item() for sequences in batches()]
        repatch({"use_flash_attn": False})  # as the next engine does, before it applies its patch
        verl.patch.apply_router_replay_patch()
        compare_with_the_core(verl, Job("groups_sigmoid_bias", "full"), batches())
        compare_with_the_core(verl, first, batches())
        after = [first.forward(sequences).item() for sequences in batches()]
    return {"done": done, "first engine": before == after, "mindspeed": mindspeed.__file__}
