"""What npu_replay knows of other products: one module each, all with the same face.

Importing this package imports no product. A module says what it probes, what it offers, and how it is
undone, in that order.
"""

from npu_replay.compat import (
    config_flags,
    cpu,
    cuda,
    import_hook,
    live_models,
    megatron,
    megatron_layout,
    mindspeed,
    mindspeed_llm,
    mindspeed_overlap,
    patching,
    pristine,
    probe,
    torch_npu,
    transformers,
    verl,
    verl_config,
    verl_engine,
    verl_files,
    verl_functions,
    verl_rollout,
    verl_router_replay,
    verl_routes,
    verl_switch,
)

__all__ = [
    "config_flags",
    "cpu",
    "cuda",
    "import_hook",
    "live_models",
    "megatron",
    "megatron_layout",
    "mindspeed",
    "mindspeed_llm",
    "mindspeed_overlap",
    "patching",
    "pristine",
    "probe",
    "torch_npu",
    "transformers",
    "verl",
    "verl_config",
    "verl_engine",
    "verl_files",
    "verl_functions",
    "verl_rollout",
    "verl_router_replay",
    "verl_routes",
    "verl_switch",
]
