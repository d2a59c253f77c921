"""What is measured of layouts that are read off a framework's preprocessing: verl's FSDP road, a micro-batch.

An engine that packs as verl's does stands for it; what is around its preprocessing is this library's.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.timing import Way
from npu_replay.compat.verl.files import TOKENS as IDS
from npu_replay.compat.verl.fsdp import layout_of

TOKENS = 32_768


def ways(batch: torch.Tensor) -> list[Way]:
    """The ways to measure, of a batch [sequences, length]: the first of its lengths, and those after it."""
    micro_batch = _MicroBatch({IDS: torch.nested.as_nested_tensor(list(batch), layout=torch.jagged)})
    engine, kept = _Engine(), dict[Any, Any]()
    return [
        Way("layout read", lambda: layout_of(engine, micro_batch, {})),
        Way("such lengths again", lambda: layout_of(engine, micro_batch, kept)),
    ]


class _Engine:
    """Packs sequences into one row, and the labels beside it."""

    ulysses_sequence_parallel_size = 1

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        packed = micro_batch[IDS].values()[None]
        return {IDS: packed}, {"input_ids_rmpad_rolled": packed.roll(-1, dims=1)}


class _MicroBatch(dict[str, Any]):
    """verl's is a TensorDict."""

    def clone(self, recurse: bool) -> _MicroBatch:
        return _MicroBatch(self)
