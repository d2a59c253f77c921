"""What vllm-ascend imports and a machine without an NPU hasn't: torch_npu, acl, mooncake, triton's runtime.

Nothing of it computes. An operator that is called gives an `Absent` back, which no tensor code takes: a route
can't come out right by way of a kernel that isn't there. The few that layers do need are in kernels.py.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers.utils

PRODUCTS = ("torch_npu", "torchair", "npugraph_ex", "acl", "mooncake", "memcache_hybrid", "fla_npu")
# What vLLM imports on the way, and routes never use.
BESIDE = ("ijson", "mistral_common", "compressed_tensors", "torchvision", "scipy", "numba", "diskcache")
# vLLM has a triton of its own where there is none, without this.
MODULES = ("triton.runtime", "vllm_ascend.patch.worker.patch_npugraph_ex_triton")
LENT = Path(__file__).parents[1] / "stubs" / "torch_npu" / "on_cpu.py"
"""What an NPU does and a CPU doesn't, of the stub of torch_npu, which computes and isn't on the path here."""


class Absent:
    """Any name of a product that isn't there: to be imported, subclassed, called and used as a decorator."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None: ...

    def __call__(self, *args: Any, **_: Any) -> Any:
        # A bare decorator gives its function back.
        return args[0] if len(args) == 1 and callable(args[0]) else Absent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __getitem__(self, _: Any) -> Any:
        return Absent()

    __iter__ = None

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (Absent,)

    def __or__(self, _: Any) -> Any:
        return Any

    __ror__ = __or__

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()


class _Finder(MetaPathFinder, Loader):
    """Any module of PRODUCTS."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in PRODUCTS + BESIDE and name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in(device: str) -> None:
    """For the life of the process, before vllm or vllm_ascend is imported. `device` is what a build writes
    down: A2, A3, A5 or _310P."""
    build = ModuleType("vllm_ascend._build_info")
    build.__device_type__ = device
    sys.modules[build.__name__] = build
    # transformers asks once, and would take the stand-in for the real one.
    transformers.utils.is_torchvision_available()
    sys.meta_path.insert(0, _Finder())
    lent = runpy.run_path(str(LENT))
    lent["lend_devices"]()
    lent["lend_groups"]()  # MC2 asks for a group's name for HCCL
    torch.npu = _AbsentModule("torch.npu")
    torch.npu.Event = torch.npu.ExternalEvent = torch.npu.Stream = Absent
    torch.npu.is_available = lambda: False
    torch.npu.device_count = lambda: 1
    torch.npu.current_device = lambda: 0
    torch.npu.get_device_name = lambda *_: "no NPU"
    sys.modules["torch.npu"] = torch.npu
    torch.version.cann = None
    torch.distributed.is_hccl_available = lambda: False
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    _stand_in_for_the_platform()


def _stand_in_for_the_platform() -> None:
    """vLLM finds a platform by an entry point, which unpacked sources lack; its operators run on the CPU."""
    import vllm.platforms
    from vllm.utils import torch_utils

    register = torch_utils.direct_register_custom_op

    def on_cpu(*args: Any, **kwargs: Any) -> None:
        register(*args, **{**kwargs, "dispatch_key": "CPU"})

    torch_utils.direct_register_custom_op = on_cpu
    from vllm_ascend.platform import NPUPlatform

    vllm.platforms._current_platform = NPUPlatform()
