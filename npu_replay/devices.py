"""Which device to run on: cpu, cuda or npu, asked of torch without waking what isn't wanted."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator

import torch

from npu_replay.errors import ReplayError

CHOICES = ("auto", "cpu", "cuda", "npu")


def pick(name: str) -> torch.device:
    """The device called `name`; "auto" takes an accelerator if there is one.

    Raises:
        ReplayError: it isn't available; says what is.
    """
    found = available()
    if name == "auto":
        return torch.device(found[0])
    if name not in found:
        raise ReplayError(
            f"there is no {name} device here",
            expected=" or ".join(found),
            got=name,
            cause="torch built without it, a driver that isn't loaded, or (npu) torch_npu without CANN",
        )
    return torch.device(name)


def available() -> list[str]:
    """The devices that can be used, best first; the CPU is always last."""
    found = [name for name in ("npu", "cuda") if _is_available(name)]
    return [*found, "cpu"]


def _is_available(name: str) -> bool:
    if name == "npu" and not hasattr(torch, "npu"):
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            importlib.import_module("torch_npu")
        except Exception:  # noqa: BLE001  a missing CANN raises anything
            return False
    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread on the CPU: small matrices aren't worth sharing out, and on a busy machine threads wait for
    each other instead."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
