"""torch_npu.npu, which is torch.npu: one CPU that runs everything in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream(nullcontext):  # type: ignore[type-arg]
    """A stream on a device that has only one."""

    npu_stream = 0
    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self)

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


SyncLaunchStream = Stream
_STREAM = Stream()


class _Generators:
    """The CPU's generator, by whatever index a device has."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator


def stream(stream: Any) -> Any:
    return nullcontext(stream)


def current_stream(*_: Any) -> Stream:
    return _STREAM


default_stream = current_stream


def is_available() -> bool:
    """False: there is none, and what asks runs on the CPU."""
    return False


def device_count() -> int:
    return 1


def current_device() -> torch.device:
    return CPU


def set_device(*_: Any) -> None: ...


def get_device_name(*_: Any) -> str:
    return "Ascend910B, a stub"


def synchronize(*_: Any, **__: Any) -> None: ...


def empty_cache() -> None: ...


def memory_allocated(*_: Any) -> int:
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def mem_get_info(*_: Any) -> tuple[int, int]:
    """Free and in all, in bytes."""
    return 0, 0


def reset_peak_memory_stats(*_: Any) -> None: ...


def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def _lazy_call(function: Callable[[], Any], **_: Any) -> Any:
    return function()


amp = SimpleNamespace(autocast=lambda **_: nullcontext())
device = torch.device
default_generators = _Generators()
mstx = SimpleNamespace(range_start=lambda *_: 0, range_end=lambda *_: None, mark=lambda *_: None)
