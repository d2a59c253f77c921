"""Fusible operations: Megatron-core names two in annotations."""

from __future__ import annotations

from .unbuilt import Unbuilt


class FusibleOperation(Unbuilt): ...


class Sequential(Unbuilt): ...
