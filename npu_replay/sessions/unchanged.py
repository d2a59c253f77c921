"""Check that routing code stays in place while a block is open: modules, hooks and functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from npu_replay.errors import RouterError, described
from npu_replay.routers import Router, find
from npu_replay.sessions.backward import in_backward


class Unchanged:
    """Compares entries of dictionaries with their values when the block was entered.

    A module that takes a router's place chooses by itself. Where that happens between a forward and its
    recompute, no other check shows it.
    """

    def __init__(self, chunks: Sequence[nn.Module], routers: Sequence[Sequence[Router]]) -> None:
        self._chunks = list(chunks)
        self._routers = _by_layer(routers)
        self._held: dict[tuple[int, Any], tuple[str, Mapping[Any, Any], Any, Any]] = {}
        self._hold_ways(routers)

    def hold(self, name: str, place: Mapping[Any, Any], key: Any) -> None:
        """Require that `place[key]` stays as it is; an error calls it `name`."""
        self._held[id(place), key] = name, place, key, place.get(key)

    def _hold_ways(self, routers: Sequence[Sequence[Router]]) -> None:
        for chunk, found in zip(self._chunks, routers, strict=True):
            for path in (router.path for router in found if router.path):
                parent = chunk
                for name in path.split("."):
                    self.hold(path, parent._modules, name)
                    parent = parent.get_submodule(name)

    def check(self, where: str) -> None:
        """Refuse what was replaced, moved or removed, except a router that was wrapped before its forward."""
        for name, place, key, before in self._held.values():
            if (now := place.get(key)) is before:
                continue
            if isinstance(before, nn.Module) and not in_backward():
                routers = find(self._chunks)
                if _by_layer(routers) == self._routers:
                    del self._held[id(place), key]
                    self._hold_ways(routers)
                    self.check(where)
                    return
            own = "none of its own"
            raise RouterError(
                "the code that routes was replaced inside an open block",
                where=f"{where}, {name}",
                expected=own if before is None else described(before),
                got=own if now is None else f"another {described(now)}",
                cause="MindSpeed's repatch(), or another library's patch, in the middle of a block; layers "
                "that were replaced, swapped or merged with adapters; module._forward_hooks.clear(). Do it "
                "before the block or after it",
            )


def _by_layer(routers: Sequence[Sequence[Router]]) -> dict[int, nn.Module]:
    return {router.label: router.module for found in routers for router in found}
