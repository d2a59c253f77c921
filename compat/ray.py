"""Carries routes in Ray's object store: out of band, counted, and shared by all processes of a node.

It needs `ray` in each process, and a started Ray. An object belongs to the process that put it: Ray frees it
when the last reference is gone, and spills to disk by its own rules.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from npu_replay.delivery.references import LAYERS_A_PIECE, Reference, checked_cut, put_away
from npu_replay.errors import ReplayError
from npu_replay.routes.routed_experts import RoutedExperts


class RayCarrier:
    """Puts each piece of a sample's routes as one object of this process's Ray job.

        carrier = RayCarrier(cut=parallel)
        reference = carrier.put(npu_replay.from_vllm(output, config))

    Args:
        cut: the job's ParallelLayout, with its decoder: a piece for each pipeline rank, with the layers of
            all its virtual stages; or the number of layers of a piece.

    Raises:
        ReplayError: Ray isn't started in this process.
    """

    def __init__(self, *, cut: Any = LAYERS_A_PIECE) -> None:
        self._cut = checked_cut(cut)

    def put(self, routes: RoutedExperts, *, step: int = 0) -> Reference:
        """Put one sample's routes; `fetch` reads the returned reference in any process of the job.

        Args:
            routes: RoutedExperts, so their ids are checked; `fetch` checks none again.
            step: the job's step, which the reference carries.

        Raises:
            ReplayError: Ray isn't started in this process.
        """
        return self.put_all([routes], step=step)[0]

    def put_all(self, samples: Iterable[RoutedExperts], *, step: int = 0) -> list[Reference]:
        """Put several samples' routes at once."""
        return put_away(samples, self._cut, _put, read_objects, step)


def _put(pieces: Sequence[RoutedExperts]) -> list[Object]:
    ray = _ray("put routes into")
    return [Object(ray.put(piece)) for piece in pieces]


class Object:
    """Holds one object's reference, so that it can also be pickled outside of Ray's own messages."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        # In Ray's own messages Ray counts the reference. Elsewhere it is passed on whole, and uncounted: the
        # process that put the object must keep a handle as long as it may be read. A bare ObjectRef would
        # lose its owner's address there, and reading it would never end.
        worker = _worker()
        if worker.get_serialization_context().is_in_band_serialization():
            return Object, (self.ref,)
        _, owner, status = worker.core_worker.serialize_object_ref(self.ref)
        return _registered, (self.ref.binary(), owner, status)

    def __deepcopy__(self, memo: object) -> Object:
        return self


def _registered(binary: bytes, owner: bytes, status: bytes) -> Object:
    """Register a handle that came outside of Ray's messages in this process."""
    ray = _ray("read routes from")
    ref = ray.ObjectRef(binary, owner)
    _worker().core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    return Object(ref)


def _worker() -> Any:
    """Return the worker by which Ray pickles ObjectRefs. This is a hack: Ray has no public way to do so."""
    from ray._private import worker

    worker_here: Any = worker.global_worker
    worker_here.check_connected()
    return worker_here


def read_objects(handles: Sequence[Any], patience: float) -> list[RoutedExperts | Exception]:
    """Read these objects, with an exception in the place of each that is lost or late."""
    ray = _ray("read routes from")
    until = time.monotonic() + patience
    refs = [handle.ref for handle in handles]
    try:
        return list(ray.get(refs, timeout=patience))
    except Exception as error:  # noqa: BLE001  of one object: each is read singly below
        error.__traceback__ = None  # Ray's frame holds the error, which would hold the handles
        left = max(until - time.monotonic(), 0.1)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=left, fetch_local=True)
        there = set(ready)
        return [_one(ray, ref, ref in there) for ref in refs]


def _one(ray: Any, ref: Any, ready: bool) -> RoutedExperts | Exception:
    try:
        return ray.get(ref, timeout=5.0 if ready else 0.0)  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001  Ray has a kind for each way to lose an object
        error.__traceback__ = None
        lines = str(error).strip().splitlines() or [""]
        return LookupError(f"{type(error).__name__}: {lines[0]}")


def _ray(what: str) -> Any:
    """Return Ray's module; raise a ReplayError unless Ray is started in this process."""
    import ray

    ReplayError.unless(
        ray.is_initialized(),
        f"there is no Ray to {what}",
        "ray.init(), or a process that Ray has started",
        "a Ray that isn't started here",
        "a process of torchrun's: where ranks aren't Ray's, write a RouteStore into a folder that all see",
    )
    return ray
