"""verl on a CPU: a platform of verl's own kind, and what of verl asks for CUDA all the same.

A plug-in of verl's (VERL_USE_EXTERNAL_MODULES), so it is in every process of a job: the driver, Ray's
workers, the vLLM server and its engine core. docs/dev/verl.md has the lines that stand in the way.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from npu_replay.compat.patching import import_hook

_MEMORY = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("empty_cache", "reset_peak_memory_stats"),
)


def _nothing(*_: Any, **__: Any) -> None:
    """There is one device, and it is there."""


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    """A CPU; Ray counts it as a GPU, since verl's pools are made of these."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__}
        | {name: lambda *_, **__: 0 for name in _MEMORY}
        | {
            "mem_get_info": lambda *_: (0, 0),
            "get_device_name": lambda *_: "CPU",
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
            "get_rng_state": torch.get_rng_state,
            "set_rng_state": torch.set_rng_state,
        }
    )
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = _nothing
    empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl hands it to Tensor.to()

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


def _one_backend(module: Any) -> None:
    """verl names a backend for "cpu" and one for its device, and torch refuses the same device twice."""
    module.initialize_global_process_group_ray = functools.partial(
        module.initialize_global_process_group_ray, backend="gloo"
    )


def _weights_stay(module: Any) -> None:
    """vLLM packs a linear layer's weight for oneDNN and drops it: verl's next weights find no place."""
    module._supports_onednn = False


def _packed_again(module: Any) -> None:
    """vLLM 0.30 packs experts for a CPU when it loads a model, and not when it is given new weights."""
    method = module.UnquantizedFusedMoEMethod
    first_time = method._setup_kernel

    def setup(self: Any, **weights: Any) -> None:
        self.moe_kernel = None
        first_time(self, **weights)

    method._setup_kernel = setup


def _engine(module: Any) -> None:
    from verl_live import engine

    engine.register(module)


import_hook.when_imported("verl.utils.distributed", "a CPU's process group", _one_backend)
import_hook.when_imported("verl.workers.engine.megatron.transformer_impl", "a CPU's engine", _engine)
import_hook.when_imported("vllm._custom_ops", "weights that can be loaded again", _weights_stay)
_MOE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
import_hook.when_imported(_MOE, "experts that are packed again", _packed_again)
