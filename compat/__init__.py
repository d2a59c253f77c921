"""What npu_replay knows of other products: a package or a module each.

Importing this package imports no product, and of its modules those that are used.
"""

from typing import TYPE_CHECKING

from npu_replay import lazy

if __name__ == "compat":  # the clone is on the path, and somebody asks for a compat of theirs
    raise ModuleNotFoundError(f"No module named 'compat' ({__file__} is npu_replay.compat)", name="compat")

if TYPE_CHECKING:
    from npu_replay.compat import (
        cpu as cpu,
        cuda as cuda,
        engines as engines,
        megatron as megatron,
        megatron_backports as megatron_backports,
        mindspeed as mindspeed,
        patching as patching,
        peft as peft,
        probe as probe,
        ray as ray,
        roll as roll,
        sglang as sglang,
        slime as slime,
        swift as swift,
        torch_npu as torch_npu,
        trainer_log as trainer_log,
        transformers as transformers,
        verl as verl,
        vllm as vllm,
        vllm_ascend as vllm_ascend,
    )


if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__, __all__ = lazy.names(__name__)
