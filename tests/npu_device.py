"""A simulated «npu»: a device written in Python, whose memory is the CPU's.

    npu_device.register()                   # for the rest of this process: torch can't forget a device
    torch.ones(2, device="npu").sum()       # runs the CPU's kernel

torch takes it for an accelerator of its own: `torch.accelerator` finds it, its tensors don't mix with the
CPU's, autograd has a thread for it and runs backward there, and the dispatch keys are those of a real one. So
code that names another device, forgets a copy, or makes a tensor without saying where fails here as there. A
storage lies over CPU memory: views alias, in-place operations reach their base, strides are true, and every
result is the CPU's to the last bit.

What a real NPU has and this hasn't:

- work that runs beside the host: its one stream has always finished, so nobody sees a wait that is missing;
- pinned memory: `pin_memory()` raises NotImplementedError, and copies are plain ones;
- collectives between ranks (device/stand_in/torch_npu has a group of one rank);
- storages that grow and shrink (FSDP2 lets go of gathered weights so);
- a second device, memory statistics, autocast, graphs, random numbers of its own (they are the CPU's);
- torch.compile: there is no compiler for it, so what runs on it needs TORCHDYNAMO_DISABLE=1;
- torch_npu's own operators, and its kernels' choice of dtypes: it has the CPU's, and lacks what those lack (a
  histogram of integers, which transformers' grouped experts ask of a device).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "npu"
_CPU = torch.device("cpu")
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def lacking() -> str:
    """Why this torch can't host a device that is written in Python; empty if it can."""
    for name, owner in (
        ("_setup_privateuseone_for_python_backend", backend_registration),
        ("_acc", torch._C),
        ("_construct_storage_from_data_pointer", torch._C),
    ):
        if not hasattr(owner, name):
            return f"torch {torch.__version__} has no {owner.__name__}.{name} to host a device in Python"
    return ""


@functools.cache
def register() -> torch.device:
    """Give this process the device. There is no way back."""
    if reason := lacking():
        raise RuntimeError(reason)
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=_Module(f"torch.{NAME}")
    )
    _libraries.append(torch.library.Library("_", "IMPL"))
    _libraries[-1].fallback(_run_on_cpu, "PrivateUse1")
    _libraries.append(torch.library.Library("aten", "IMPL"))
    _libraries[-1].impl("_copy_from", _copy_from, "PrivateUse1")
    return torch.device(NAME, 0)


_libraries: list[torch.library.Library] = []  # what is registered ends with its library


# Memory


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor that lies over the same memory as one on the device."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storage.below, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _on_device(below: torch.Tensor) -> torch.Tensor:
    """A tensor on the device, over the memory of a CPU tensor that nobody else has."""
    return _put(torch._C._acc.create_empty_tensor([0], below.dtype), below)


def _put(tensor: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Lay a tensor of the device over the memory of a CPU tensor."""
    lower = below.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        lower.data_ptr(), torch.device(NAME, 0), lower.nbytes()
    )
    storage.below = lower  # lives as long as the storage does, whoever holds that
    placed = below.storage_offset(), below.size(), below.stride()
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_CPU_KEY, tensor, storage, *placed)


def _view(base: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """A view of `base`, as `below` is one of its memory."""
    if base.dtype != below.dtype:
        raise NotImplementedError(f"a view of {base.dtype} as {below.dtype} on the simulated {NAME}")
    placed = below.size(), below.stride(), below.storage_offset()
    return torch.ops.aten.as_strided.default.redispatch(_CPU_KEY, base, *placed)


# Operations


waits: list[str] = []
"""What the host has waited for so far: numbers that it read, and copies of the device's memory."""


def _run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: the CPU's, over the same memory. Its results become tensors of the device."""
    if op.__name__.partition(".")[0] in ("_local_scalar_dense", "nonzero", "equal"):
        waits.append(op.__name__)
    lowered: list[tuple[torch.Tensor, torch.Tensor]] = []
    strangers: list[torch.Tensor] = []

    def lower(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.device.type != NAME:
                strangers.append(x)
                return x
            lowered.append((memory(x), x))
            return lowered[-1][0]
        return _CPU if isinstance(x, torch.device) and x.type == NAME else x

    def lift(x: Any) -> Any:
        return _lifted(x, lowered) if isinstance(x, torch.Tensor) else x

    with torch._C.DisableTorchFunction():  # a real device's operations call none that a mode could see
        args = _each(lower, _with_tensors(op, args))
        kwargs = {name: _each(lower, value) for name, value in kwargs.items()}
        _check_strangers(op, strangers, mixed=bool(lowered))
        return _each(lift, op(*args, **kwargs))


def _with_tensors(op: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arguments, with a tensor for each number that torch passes in the place of one (`ids & 1`)."""
    wanted = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    return [
        torch.tensor(argument) if is_tensor and isinstance(argument, (int, float)) else argument
        for argument, is_tensor in zip(args, wanted, strict=False)
    ]


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """`change` of every tensor and device in the arguments or results of an operation."""
    if isinstance(x, (list, tuple)):
        changed = [_each(change, part) for part in x]
        return changed if isinstance(x, list) else tuple(changed)
    return change(x)


def _lifted(x: torch.Tensor, lowered: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    for below, original in lowered:
        if x is below:  # in place; where it changed its shape, as many `out=` do, lay it anew
            same = (x.size(), x.stride()) == (original.size(), original.stride())
            return original if same else _put(original, x)
    for below, original in lowered:
        if x.untyped_storage()._cdata == below.untyped_storage()._cdata:
            return _view(original, x)
    return _on_device(x)


def _check_strangers(op: Any, strangers: list[torch.Tensor], *, mixed: bool) -> None:
    """As on every device: among its tensors none of the CPU's, but for single numbers, and for an index."""
    wrong = [x for x in strangers if x.dim() > 0]
    if wrong and mixed and op.overloadpacket.__name__ not in ("index", "index_put", "index_put_"):
        raise RuntimeError(f"{op}: expected all tensors on {NAME}, got one on {wrong[0].device}")


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if target.device.type != NAME:
        waits.append("copy to the host")
    with torch._C.DisableTorchFunction():
        ends = [memory(x) if x.device.type == NAME else x for x in (source, target)]
        ends[1].copy_(ends[0])
    return target


# torch.npu


class _Done:
    """The one stream, which has finished, and every event, which has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Done:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    synchronize = wait = record = wait_stream = wait_event = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Done()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _always(value: Any) -> Any:
    return staticmethod(lambda *_, **__: value)


class _Module(types.ModuleType):
    """`torch.npu`: what torch itself and Megatron-core ask of a device. Random numbers are the CPU's."""

    # One function for each name: torch.compile sorts functions by identity.
    Stream = Event = _Done
    is_available = _always(True)
    is_initialized = _always(True)
    _is_in_bad_fork = _always(False)
    device_count = _always(1)
    current_device = _always(0)
    set_device = _always(None)
    get_device_name = _always(f"simulated {NAME}")
    get_amp_supported_dtype = _always([torch.bfloat16, torch.float16])
    synchronize = _always(None)
    empty_cache = _always(None)
    current_stream = _always(_Done())
    default_stream = _always(_Done())
    stream = _always(contextlib.nullcontext())
    device = _always(contextlib.nullcontext())
    manual_seed_all = _always(None)

    @staticmethod
    def manual_seed(seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)
