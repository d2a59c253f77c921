"""Keep track of the router calls that autograd may still run again, and the ids kept for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from npu_replay.errors import RouterError, micro_batch
from npu_replay.sessions.masks import address

FEW = 2**17
"""Up to this number of ids, a router gets the tensor itself: a copy of each costs a kernel (1 MB)."""

Key: TypeAlias = "tuple[int, int]"
"""A router's call: layer label and micro-batch."""


class _Around(weakref.ref[Any]):
    """Refers weakly to what encloses a call, and holds the call's key."""

    __slots__ = ("key",)
    key: Key


class Recomputes:
    """Tracks the router calls that autograd may still run again, and those that it has."""

    def __init__(self) -> None:
        self._around: dict[Key, list[_Around]] = {}
        self._ran: set[Key] = set()
        self._dead: deque[_Around] = deque()

    def __len__(self) -> int:
        return len(self._around)

    def __contains__(self, key: Key) -> bool:
        return key in self._around

    @property
    def oldest(self) -> Key | None:
        return next(iter(self._around), None)

    def expect(self, key: Key, around: list[Any]) -> None:
        """Note that autograd may recompute this call while any of `around`, which enclose it, lives."""
        # The callback is a C function, since an interrupt in a weak reference's Python callback is lost.
        self._around[key] = [_Around(one, self._dead.append) for one in around]
        for one in self._around[key]:
            one.key = key

    def ran(self, key: Key) -> None:
        self._ran.add(key)

    def drop(self, key: Key) -> None:
        self._around.pop(key, None)
        self._ran.discard(key)

    def settle(self, release: Callable[[Key], object]) -> None:
        """Drop the calls whose graphs have died since, and call `release` with each."""
        while self._dead:
            key = getattr(self._dead[0], "key", None)
            if key in self._around and not self._may_come(key):
                release(key)
                self.drop(key)
            self._dead.popleft()

    def due(self) -> list[Key]:
        """Return the calls that autograd may still recompute and hasn't."""
        return [key for key in self._around if key not in self._ran and self._may_come(key)]

    def clear(self) -> None:
        self._around.clear()
        self._ran.clear()

    def _may_come(self, key: Key) -> bool:
        return any(one() is not None for one in self._around.get(key, ()))


class KeptIds:
    """Keeps the ids of routers' calls in a narrow dtype, for their recomputes and for a record."""

    def __init__(self) -> None:
        self._ids: dict[Key, torch.Tensor] = {}
        self._wide: dict[Key, tuple[torch.Tensor, torch.dtype]] = {}
        # int64 ids and their dtype to be: a cast for each small tensor costs more than one for all of them.

    def __iter__(self) -> Iterator[Key]:
        return iter([*self._ids, *self._wide])

    def __len__(self) -> int:
        return len(self._ids) + len(self._wide)

    def keep(self, key: Key, ids: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep int64 ids of a call in this dtype; the tensor itself is held until `narrow` or `get`."""
        if ids.numel() <= FEW and not ids.is_inference():
            self._wide[key] = ids, dtype
        else:
            # A tensor made under inference_mode can't be saved for backward; its int64 copy can.
            self._ids[key] = ids.to(dtype)

    def keep_narrow(self, key: Key, ids: torch.Tensor) -> None:
        self._ids[key] = ids

    def narrow(self) -> dict[Key, torch.Tensor]:
        """Cast what is still int64, tensors of one size together, and return all."""
        wide, self._wide = self._wide, {}
        alike: dict[object, list[Key]] = {}
        for key, (ids, dtype) in wide.items():
            alike.setdefault((ids.shape, ids.device, dtype), []).append(key)
        self._check_apart(wide)
        for keys in alike.values():
            cast = torch.stack([wide[key][0] for key in keys]).to(wide[keys[0]][1])
            self._ids.update(zip(keys, cast.unbind(), strict=True))
        return self._ids

    def get(self, key: Key) -> torch.Tensor | None:
        return self.narrow().get(key)

    def drop(self, key: Key) -> None:
        self._ids.pop(key, None)
        self._wide.pop(key, None)

    def clear(self) -> None:
        self._ids.clear()
        self._wide.clear()

    def _check_apart(self, wide: dict[Key, tuple[torch.Tensor, torch.dtype]]) -> None:
        """Refuse ids of several routers that lie in one buffer: it holds only the last of them now."""
        places = {address(ids): key for key, (ids, _) in wide.items() if ids.numel()}
        if len(places) < sum(bool(ids.numel()) for ids, _ in wide.values()):
            layer, number = next(key for key in wide if key not in places.values())
            raise RouterError(
                "the top-ks of several routers return their ids in one buffer, which is overwritten",
                where=micro_batch(number, layer),
                expected="a tensor of its own from each top-k",
                got="the same memory",
                cause="a patched torch.topk, or a mode, that returns a static buffer (for graph capture)",
            )
