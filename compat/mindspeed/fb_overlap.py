"""Marks the recomputes of MindSpeed's moe_fb_overlap where it runs them.

It runs the backward of one micro-batch with the forward of the next, layer by layer. A recomputed layer keeps
its inputs in the LayerGraph that it returns; MindSpeed reruns it outside autograd's backward, in another
micro-batch's forward. Both places that do so, in every branch, unpack `layer_inputs` right before. So the
unpacking marks the router's next call as one of the graph's micro-batch.

Asks:     the parameters of the forward that MindSpeed has bound to a layer.
Changes:  two hooks on the layer, and the `layer_inputs` of the graphs that it returns.
Undone:   the hooks go with the block, the inputs with their graph; nothing of MindSpeed's is replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

from torch import nn

from npu_replay.errors import RecomputeError, RouterError
from npu_replay.routers import Handle, Router
from npu_replay.seam.torch_state import Hook
from npu_replay.sessions.timeline import Marks

_SIGNS = {"checkpoint", "bwd_layer_graph"}
"""Parameters of a layer's forward that MindSpeed has bound to it."""


def mark(chunk: nn.Module, routers: Sequence[Router], marks: Marks) -> list[Handle]:
    """Register the hooks on a chunk's overlapped layers; refuse recomputes in layers of an unknown kind."""
    layers = [(router, _overlapped_layer(chunk, router)) for router in routers]
    for router, layer in layers:
        config: Any = getattr(router.module, "config", None)
        recomputes = getattr(config, "moe_fb_overlap", False) and config.recompute_granularity == "full"
        if layer is None and recomputes:
            raise RouterError(
                "moe_fb_overlap recomputes in a place that npu_replay doesn't know",
                where=router.path,
                expected=f"a layer whose own forward takes {' and '.join(sorted(_SIGNS))}",
                got="none around this router",
                cause="a branch of MindSpeed that is built otherwise, or moe_fb_overlap set after the model "
                "was built; turn activation recompute or moe_fb_overlap off",
            )
    return [_Overlapped(layer, router, marks) for router, layer in layers if layer is not None]


class _Rerun:
    """Represents one run of a layer that MindSpeed may repeat; lives as long as the layer's graph."""

    def __init__(self, router: nn.Module, marks: Marks) -> None:
        self.begins = functools.partial(marks.announce, router, marks.running())
        marks.foresee(router, self)


class _Inputs(tuple[Any, ...]):
    """Marks the rerun of a layer when MindSpeed unpacks the layer's inputs."""

    reruns: list[_Rerun]
    """One for each block that is open on the model."""

    def __iter__(self) -> Iterator[Any]:
        for rerun in self.reruns:
            rerun.begins()
        return super().__iter__()


class _Overlapped:
    """Holds the two hooks of a layer, until they are removed."""

    def __init__(self, layer: nn.Module, router: Router, marks: Marks) -> None:
        self._router = router
        self._marks = marks
        self._expected: _Rerun | None = None
        begins = Hook(self, _Overlapped._begins, layer)
        ends = Hook(self, _Overlapped._ends, layer)
        self._handles = (
            layer.register_forward_pre_hook(begins, with_kwargs=True),
            layer.register_forward_hook(ends),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._expected = _Rerun(self._router.module, self._marks) if kwargs.get("checkpoint") else None

    def _ends(self, args: tuple[Any, ...], output: object) -> None:
        if self._expected is None:
            return
        # The LayerGraph among what a layer returns: (hidden states, context, graph, ...).
        graph: Any = output[2] if isinstance(output, tuple) and len(output) > 2 else None
        inputs = getattr(graph, "layer_inputs", None)
        if not (getattr(graph, "checkpointed", False) and isinstance(inputs, tuple)):
            raise RecomputeError(
                "moe_fb_overlap keeps what it runs again in a place that npu_replay doesn't know",
                where=self._router.path,
                expected="a graph with checkpointed and layer_inputs, third in what the layer returns",
                got=type(output).__name__ if graph is None else f"{type(graph).__name__} without them",
                cause="a branch of MindSpeed that is built otherwise; turn off recompute or moe_fb_overlap",
            )
        if not isinstance(graph.layer_inputs, _Inputs):
            graph.layer_inputs = _Inputs(graph.layer_inputs)
            graph.layer_inputs.reruns = []
        graph.layer_inputs.reruns.append(self._expected)
        self._expected = None


def _overlapped_layer(chunk: nn.Module, router: Router) -> nn.Module | None:
    """Return the layer around a router, if MindSpeed has bound another forward to it."""
    path = router.path.split(".")
    for length in range(len(path) - 1, 0, -1):
        layer = chunk.get_submodule(".".join(path[:length]))
        forward = vars(layer).get("forward")
        if isinstance(forward, MethodType) and inspect.signature(forward).parameters.keys() >= _SIGNS:
            return layer
    return None
