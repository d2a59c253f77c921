"""What npu_replay knows of other products: a package or a module each.

Importing this package imports no product, and of its modules those that are used.
"""

from typing import TYPE_CHECKING

from npu_replay import lazy

if __name__ == "compat":  # the clone is on the path, and somebody asks for a compat of theirs
    raise ModuleNotFoundError(f"No module named 'compat' ({__file__} is npu_replay.compat)", name="compat")

if TYPE_CHECKING:
    from npu_replay.compat import (
        cpu,
        cuda,
        engines,
        megatron,
        megatron_backports,
        mindspeed,
        patching,
        peft,
        probe,
        ray,
        roll,
        sglang,
        slime,
        swift,
        torch_npu,
        trainer_log,
        transformers,
        verl,
        vllm,
        vllm_ascend,
    )

# fmt: off
__all__ = [
    "cpu", "cuda", "engines", "megatron", "megatron_backports", "mindspeed", "patching", "peft", "probe",
    "ray", "roll", "sglang", "slime", "swift", "torch_npu", "trainer_log", "transformers", "verl", "vllm",
    "vllm_ascend",
]
# fmt: on

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy.names(__name__, {name: name for name in __all__})
