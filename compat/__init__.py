"""What npu_replay knows of other products: one module each, all with the same face.

Importing this package imports no product. A module says what it probes, what it offers, and how it is
undone, in that order.
"""

from npu_replay.compat import (
    config_flags,
    cpu,
    cuda,
    import_hook,
    megatron,
    megatron_layout,
    mindspeed,
    mindspeed_llm,
    mindspeed_overlap,
    patching,
    probe,
    torch_npu,
    transformers,
)

__all__ = [
    "config_flags",
    "cpu",
    "cuda",
    "import_hook",
    "megatron",
    "megatron_layout",
    "mindspeed",
    "mindspeed_llm",
    "mindspeed_overlap",
    "patching",
    "probe",
    "torch_npu",
    "transformers",
]
