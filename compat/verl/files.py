"""Implements verl's router_replay.record_file and replay_file, which verl itself ignores, as a RouteStore.

With record_file the routes of every sample that the actor computes log-probs for are written, recorded (R2)
or given (R3). With replay_file, in mode R3, they are read by the tokens and images of each sample, and the
rollout need not send any. Each data-parallel rank has one writer, which writes one shard a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu_replay.compat.verl import tensors
from npu_replay.compat.verl.batch_routes import listed
from npu_replay.errors import MicroBatchError
from npu_replay.routes.fingerprint import find_other_length, fingerprint
from npu_replay.routes.inputs import input_key, other_inputs
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.routes.store import RouteStore, RouteWriter, key_of

logger = logging.getLogger(__name__)

ROUTES = "routed_experts"
TOKENS = "input_ids"
IMAGES = "multi_modal_inputs"


@dataclass
class Files:
    """Holds the folders of one engine: where routes are written (`record`) and read (`replay`)."""

    record: Path | None
    replay: Path | None
    _writer: RouteWriter | None = None
    _store: RouteStore | None = None
    _written: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, settings: Any) -> Files | None:
        """Return the folders that verl's router_replay settings name; None for neither."""
        record, replay = (getattr(settings, name, None) for name in ("record_file", "replay_file"))
        if not record and not replay:
            return None
        return cls(Path(record) if record else None, Path(replay) if replay else None)

    def give(self, data: Any) -> None:
        """Put the routes of a batch's samples into it, before a pass; raises where one has none."""
        if self.record is not None and self._writer is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._writer = RouteStore.writer(self.record, name=f"rank-{rank:05d}")
        if self.replay is None:
            return
        if self._store is None:
            self._store = RouteStore(self.replay)
        stored = [self._store.of(tokens, sample_key=key) for tokens, key in _samples(data)]
        if stored:
            batch = tensors.BatchForm.of(data[TOKENS], None, None)
            data[ROUTES] = batch.filled(stored, narrow_dtype(stored[0].num_experts)).to(data[TOKENS].device)

    def keep(self, data: Any, output: Any, config: Any, *, from_rollout: bool) -> None:
        """Write the routes of new samples, after a pass, on the rank that has its output."""
        routes = data.get(ROUTES, None)
        if routes is None and isinstance(output, dict):
            routes = output.get("model_output", {}).get(ROUTES)
        if self._writer is None or routes is None:
            return
        good, problems = tensors.GivenRoutes.of(routes, None, config).routes(from_rollout=from_rollout)
        for number, (tokens, key) in enumerate(_samples(data)):
            mark = fingerprint(tokens, sample_key=key)
            routes_of_sample = good.get(number)
            if mark in self._written:
                continue
            wrong_length = (
                None if routes_of_sample is None else find_other_length(len(routes_of_sample), len(tokens))
            )
            if routes_of_sample is not None and wrong_length is None:
                rows = torch.arange(len(tokens), device="cpu")
                rows[len(routes_of_sample) :] = -1  # the last token has no route
                self._written.add(mark)
                self._writer.add(
                    routes_of_sample.take(rows).sequence(0, len(tokens), fingerprint=mark), key_of(mark)
                )
            else:
                bad = problems[number] if wrong_length is None else wrong_length.error(MicroBatchError, "")
                logger.warning("[npu_replay] routes that can't be used are not written: %s", bad)
        self._writer.flush()


def _samples(data: Any) -> Iterator[tuple[torch.Tensor, str | None]]:
    """Yield the token ids of each sample of a jagged batch, and a key of its images."""
    each = data[TOKENS].detach().cpu().unbind()
    images = listed(data.get(IMAGES, None)) or [None] * len(each)
    for ids, inputs in zip(each, images, strict=True):
        yield ids, input_key(other_inputs(inputs or {}, ids))
