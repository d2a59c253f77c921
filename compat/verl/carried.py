"""R3's routes that a batch carries: checked before a pass, once for all chunks, in this rank's layers alone.

Meanwhile the batch has keys in their place (`delivery`), by which micro-batches find what was checked. A
sample that is bad in one pipeline stage's layers takes the routers' own choice in all of them: stages tell
each other.

Probes nothing; used by `engine` where NPU_REPLAY_DELIVERY doesn't keep routes out of batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from npu_replay.compat.verl import delivery, tensors
from npu_replay.errors import InvalidRoutes, as_text
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.rank_failures import PATIENCE, Circle, Outcome
from npu_replay.rollout.batch_rows import from_batch

Found = dict[int, delivery.Routes]
_WORDS = 16
_MORE = {"problem": "these routes can't be used, as others before them"}


def checked(
    routes: torch.Tensor, config: Any, layers: Sequence[int], tokens: torch.Tensor | None = None
) -> Found:
    """By key, from 1 on, the routes of each sample of a jagged batch, or why it has none.

    Args:
        routes: jagged [tokens, columns, topk], of all decoder layers or of the MoE layers.
        config: the model's TransformerConfig or RoutedModel.
        layers: this rank's.
        tokens: jagged, the ids of the same samples.

    Raises:
        MicroBatchError: another shape than verl's, or columns that are neither.
    """
    batch = tensors.MicroBatch(routes, None, config)
    # All layers are checked: a dead router is told from a lost layer by what the others hold.
    take = functools.partial(from_batch, model=batch.routed, zeros_are_none=True)
    own = [layer for layer in batch.routed.layers if layer in {*layers}]
    each = batch.samples()
    words = [None] * len(each) if tokens is None else [one.cpu().numpy() for one in tokens.unbind()]
    found: Found = {}
    for key, (rows, ids) in enumerate(zip(each, words, strict=True), start=1):
        of_sample = ids if ids is not None and len(ids) == len(rows) else None
        try:
            found[key] = take(rows, tokens=of_sample).only(own)
        except InvalidRoutes as error:
            # verl's mask leaves the last row out, whatever it holds: its token is never fed to the engine.
            with suppress(InvalidRoutes):
                keep = torch.arange(len(rows)) < len(rows) - 1
                found[key] = take(rows, tokens=of_sample, keep=keep).only(own)
            found.setdefault(key, error.with_traceback(None))
    return found


def stages_of(config: Any) -> Any:
    """The group of this rank's pipeline; None for a model that isn't cut into stages."""
    if int(getattr(config, "pipeline_model_parallel_size", 1)) == 1:
        return None
    return ParallelLayout.from_megatron(config).groups[1]


def tell(found: Found, ranks: Any, called: str = "pipeline rank") -> None:
    """What is bad on any of these ranks is bad on all. Every one of them has to call it.

    Args:
        found: by key.
        ranks: a process group.
        called: one of them, in errors.

    Raises:
        ReplayError: ranks are gone.
    """
    circle = Circle(ranks, PATIENCE, "not all ranks told which samples are bad", "a rank that failed")
    outcome = Outcome()
    bad = {key: one for key, one in found.items() if isinstance(one, InvalidRoutes)}
    # The words of some are enough where a whole node is lost.
    mine = {key: _said(one) if number < _WORDS else _MORE for number, (key, one) in enumerate(bad.items())}
    for rank, theirs in enumerate(outcome.agree(circle, mine)):
        for key in theirs.keys() - bad.keys():
            bad[key] = found[key] = InvalidRoutes(**theirs[key]).at(f"{called} {rank}")
    if outcome.error is not None:
        raise outcome.error


def _said(error: InvalidRoutes) -> dict[str, Any]:
    """An error for others: in text alone."""
    found = {"expected": error.expected, "got": error.got}
    told = {name: None if one is None else as_text(one) for name, one in found.items()}
    return {"problem": error.problem, "where": error.where, "cause": error.cause, **told}


@contextmanager
def in_place_of(data: Any, name: str, keys: Sequence[int | None], found: Found) -> Iterator[None]:
    """Keys, if there are some, in the place of a batch's routes or marks; `found` has what is behind them."""
    if not keys:
        yield
        return
    given = data[name]
    rows = [delivery.rows_of(key, len(one)) for key, one in zip(keys, given.unbind(), strict=True)]
    data[name] = tensors.batched(rows, jagged=True).to(given.device)
    delivery.arrived.carried = found
    try:
        yield
    finally:
        data[name], delivery.arrived.carried = given, {}
