"""What npu_replay knows of other products: one module each, all with the same face.

Importing this package imports no product, and of its modules those that are used. A module says what it
probes, what it offers, and how it is undone, in that order.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if __name__ == "compat":  # the clone is on the path, and somebody asks for a compat of theirs
    raise ModuleNotFoundError(f"No module named 'compat' ({__file__} is npu_replay.compat)", name="compat")

if TYPE_CHECKING:
    from npu_replay.compat import (
        aux_losses,
        beneath_mindspeed,
        config_flags,
        cpu,
        cuda,
        expert_bias,
        fused_router,
        import_hook,
        live_models,
        live_objects,
        made_from,
        megatron,
        megatron_layout,
        mindspeed,
        mindspeed_llm,
        mindspeed_overlap,
        model_config,
        moe_functions,
        patching,
        pristine,
        probe,
        replayed_routers,
        router_methods,
        router_replay,
        served_modules,
        server_answers,
        sglang,
        sglang_answer,
        sglang_old_path,
        sglang_releases,
        sglang_rows,
        torch_npu,
        transformers,
        undoing,
        verl,
        verl_config,
        verl_door,
        verl_engine,
        verl_files,
        verl_functions,
        verl_rollout,
        verl_router_replay,
        verl_routes,
        verl_switch,
        vllm,
        vllm_arguments,
        vllm_ascend,
        vllm_completions,
        vllm_planned,
        vllm_releases,
    )

__all__ = [
    "aux_losses",
    "beneath_mindspeed",
    "config_flags",
    "cpu",
    "cuda",
    "expert_bias",
    "fused_router",
    "import_hook",
    "live_models",
    "live_objects",
    "made_from",
    "megatron",
    "megatron_layout",
    "mindspeed",
    "mindspeed_llm",
    "mindspeed_overlap",
    "model_config",
    "moe_functions",
    "patching",
    "pristine",
    "probe",
    "replayed_routers",
    "router_methods",
    "router_replay",
    "served_modules",
    "server_answers",
    "sglang",
    "sglang_answer",
    "sglang_old_path",
    "sglang_releases",
    "sglang_rows",
    "torch_npu",
    "transformers",
    "undoing",
    "verl",
    "verl_config",
    "verl_door",
    "verl_engine",
    "verl_files",
    "verl_functions",
    "verl_rollout",
    "verl_router_replay",
    "verl_routes",
    "verl_switch",
    "vllm",
    "vllm_arguments",
    "vllm_ascend",
    "vllm_completions",
    "vllm_planned",
    "vllm_releases",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> ModuleType:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")

    def __dir__() -> list[str]:
        return sorted(globals().keys() | set(__all__))
