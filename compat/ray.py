"""Ray's object store as the carrier of routes: out of band, counted, and shared by all processes of a node.

Needs `ray` in each process, and a Ray that is started. What is put belongs to the process that put it: Ray
frees it when the last reference is gone, and spills to disk by its own rules.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from npu_replay.delivery.carriers import Carrier
from npu_replay.delivery.references import Read
from npu_replay.errors import ReplayError
from npu_replay.routes.routed_experts import RoutedExperts


class RayCarrier(Carrier):
    """Puts each piece as one object of the job that this process is part of.

        carrier = RayCarrier(cut=parallel)
        reference = carrier.put(npu_replay.from_vllm(output, config))

    Raises:
        ReplayError: Ray isn't installed, or not started in this process.
    """

    def _store(self, pieces: Sequence[RoutedExperts]) -> Sequence[Any]:
        ray = _ray("put routes into")
        return [ray.put(piece) for piece in pieces]

    @staticmethod
    def reader() -> Read:
        return read_objects


def read_objects(handles: Sequence[Any], patience: float) -> list[RoutedExperts | Exception]:
    """What lies in these objects; in the place of one that is lost, or doesn't come in time, is why."""
    ray, until = _ray("read routes from"), time.monotonic() + patience
    try:
        return list(ray.get(list(handles), timeout=patience))
    except Exception as error:  # noqa: BLE001  one of them: each is asked for by itself below
        error.__traceback__ = None  # Ray's frame holds the error, which would hold the handles
        left = max(until - time.monotonic(), 0.1)
        ready, _ = ray.wait(list(handles), num_returns=len(handles), timeout=left, fetch_local=True)
        return [_one(ray, handle, handle in ready) for handle in handles]


def _one(ray: Any, handle: Any, ready: bool) -> RoutedExperts | Exception:
    try:
        return ray.get(handle, timeout=5.0 if ready else 0.0)  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001  Ray's own kinds, as many as there are ways to lose an object
        error.__traceback__ = None
        said = str(error).strip().splitlines() or [""]
        return LookupError(f"{type(error).__name__}: {said[0]}")


@contextlib.contextmanager
def joined() -> Iterator[bool]:
    """Join the Ray that is started on this machine for the block; is there one?"""
    try:
        import ray
    except ImportError:
        yield False
        return
    if ray.is_initialized():
        yield True
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError):
        yield False
        return
    try:
        yield True
    finally:
        ray.shutdown()


def _ray(what: str) -> Any:
    """Ray, started.

    Raises:
        ReplayError: it isn't.
    """
    try:
        import ray
    except ImportError as error:
        raise ReplayError(
            f"there is no Ray to {what}",
            expected="ray, installed",
            got=str(error),
            cause="another environment",
        ) from error
    ReplayError.unless(
        ray.is_initialized(),
        f"there is no Ray to {what}",
        "ray.init(), or a process that Ray has started",
        "a Ray that isn't started here",
        "a process of torchrun's; take a FolderCarrier where ranks aren't Ray's",
    )
    return ray
