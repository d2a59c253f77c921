"""A MindSpeed whose import breaks off half way, and a repatch in the middle of a block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from on_mindspeed.processes import triton_at_import


def main(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    with triton_at_import():
        if task["case"] == "half imported":
            import_half()
        else:
            import mindspeed.megatron_adaptor  # noqa: F401
    import npu_replay

    with npu_replay.compat.cpu.lend():
        from megatron.core import parallel_state, tensor_parallel

        dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        forward, model = trainer()
        block = half_imported if task["case"] == "half imported" else repatched
        found = {"error": error_of(lambda: block(forward, model)), "hooks": hooks_left(model)}
        if task["case"] != "half imported":
            found["usable"] = error_of(lambda: recorded(forward, model))
        dist.destroy_process_group()
    return found


def import_half() -> None:
    """As a Megatron of another release does: a patch finds nothing to patch, and somebody goes on."""
    from mindspeed import patch_utils

    apply, count = patch_utils.Patch.apply_patch, iter(range(1000))

    def failing(self: Any) -> None:
        if next(count) == 3:
            raise RuntimeError("no exist topk_softmax_with_capacity")
        apply(self)

    patch_utils.Patch.apply_patch = failing
    with contextlib.suppress(RuntimeError):
        import mindspeed.megatron_adaptor  # noqa: F401
    patch_utils.Patch.apply_patch = apply
    if "mindspeed.megatron_adaptor" in sys.modules:
        raise AssertionError("the import was meant to fail")


def trainer() -> tuple[Callable[[], torch.Tensor], Any]:
    from npu_replay.smoke import megatron_model

    model = megatron_model.model(megatron_model.config(num_layers=2, num_moe_experts=8, moe_router_topk=2))
    tokens = torch.randint(0, 64, (2, 8))

    def forward() -> torch.Tensor:
        return model(input_ids=tokens, **megatron_model.causal(tokens))

    return forward, model


def half_imported(forward: Callable[[], torch.Tensor], model: Any) -> None:
    recorded(forward, model)


def repatched(forward: Callable[[], torch.Tensor], model: Any) -> None:
    """With a feature that takes other routing code: what was checked no longer holds."""
    from mindspeed.megatron_adaptor import repatch

    import npu_replay

    with npu_replay.record(model):
        forward()
        feature = overriding_feature()
        repatch(feature)
        try:
            forward()
        finally:
            repatch(dict.fromkeys(feature, False) | {"moe_token_dispatcher_type": "alltoall"})


def overriding_feature() -> dict[str, Any]:
    from mindspeed.args_utils import get_mindspeed_args

    if hasattr(get_mindspeed_args(), "fix_router"):
        return {"fix_router": True, "moe_token_dispatcher_type": "alltoall"}
    return {"moe_tp_extend_ep": True, "moe_token_dispatcher_type": "alltoall_seq"}  # core_r0.16.0


def recorded(forward: Callable[[], torch.Tensor], model: Any) -> None:
    import npu_replay

    with torch.no_grad(), npu_replay.record(model):
        forward()


def hooks_left(model: Any) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def error_of(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
