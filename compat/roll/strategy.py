"""Adds R2 and R3 to ROLL's strategy fsdp2_train, in the one method that both of its passes call.

`_fsdp2_forward` has no batch, so its two callers record which batch it is, and which row comes next. An
optimizer steps inside `train_step`: before gradients are clipped, the session is closed and all ranks agree.
The mask, and ROLL's own cut for context parallelism, tell which token sits in which row.

Asks:     the names and arguments that it wraps or calls.
Changes:  `forward_step`, `train_step`, `_fsdp2_forward` and `_clip_grad_norm` of the strategy.
Undone:   by `npu_replay.uninstall()`; strategies that are alive go on as ROLL's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from npu_replay.compat.patching import import_hook, known_names
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import functions, tensors
from npu_replay.compat.verl.config import OFF
from npu_replay.compat.verl.engine_pass import RECORD, REPLAY, EnginePass, current
from npu_replay.compat.verl.files import ROUTES, TOKENS
from npu_replay.compat.verl.fsdp import WholeModelAdapter
from npu_replay.errors import MicroBatchError
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.replay import StepReplay

STRATEGY = "roll.distributed.strategy.fsdp2_strategy"
NAME = "fsdp2_train"
_WHAT = "router replay of ROLL's fsdp2 strategy"
_MASK = "attention_mask"
_RESPONSE = "response_mask"
_NEEDED = {
    "FSDP2InferStrategy._fsdp2_forward": (TOKENS, _MASK),
    "FSDP2InferStrategy.forward_step": ("batch",),
    "FSDP2InferStrategy.get_feature_on_cp_rank": (TOKENS,),
    "FSDP2TrainStrategy.train_step": ("batch",),
    "FSDP2TrainStrategy._clip_grad_norm": (),
}
_patches = Patches(_WHAT)


def install() -> None:
    import_hook.when_imported(STRATEGY, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    known_names.check(module, _NEEDED, "ROLL's fsdp2 strategy", "ROLL")
    infer = module.FSDP2InferStrategy
    train = module.FSDP2TrainStrategy
    _patches.wrap(infer, "forward_step", _forward_step, "a pass that records, or replays the engine's routes")
    _patches.wrap(train, "train_step", _train_step, "a pass that replays")
    _patches.wrap(infer, "_fsdp2_forward", _fsdp2_forward, "gives and takes the routes of a micro-batch")
    _patches.wrap(train, "_clip_grad_norm", _clip_grad_norm, "ranks agree before the optimizer steps")


def mode_of(config: Any) -> str:
    """Return the mode of a worker with this strategy; "disabled" for every other, also ROLL's on Megatron."""
    arguments = getattr(config, "strategy_args", None)
    mode = str(config.router_replay.mode)
    return mode if arguments is not None and arguments.strategy_name == NAME and mode in ("R2", "R3") else OFF


class StrategyAdapter(WholeModelAdapter):
    """Adapts a strategy of ROLL to a pass."""

    strategy = "fsdp2"
    batch: _Batch | None = None  # that it was called with
    recorded: torch.Tensor | None = None
    """What the last `forward_step` recorded, [batch, sequence, layers, topk], until it is taken."""

    @contextmanager
    def running(self, data: Any, *, trains: bool) -> Iterator[_Batch]:
        """Hold the batch that the strategy was called with, for the length of a block."""
        self.batch = batch = _Batch(self, data, trains)
        try:
            with batch.open:
                yield batch
        finally:
            self.batch = None

    @property
    def section(self) -> dict[str, str]:
        return {"mode": mode_of(self.engine.worker_config)}

    @property
    def chunks(self) -> list[Any]:
        return [self.engine.model]


@dataclass
class _Batch:
    """Holds the batch of a strategy's `forward_step` or `train_step`.

    Attributes:
        open: the session, closed before the next optimizer step.
        row: the first row of the next micro-batch.
        taken: what was recorded, [rows, sequence, layers, topk] a micro-batch.
        job: the last pass that was opened.
    """

    adapter: StrategyAdapter
    data: Any
    trains: bool
    open: ExitStack = field(default_factory=ExitStack)
    row: int = 0
    taken: list[torch.Tensor] = field(default_factory=list)
    job: Any = None

    def begin(self) -> None:
        """Open a record or a replay, unless one is open. Every rank calls it with each micro-batch."""
        if current().engine is not None:
            return
        self.job = EnginePass(self.adapter, trains=self.trains, flagged=True)
        self.open.enter_context(self.job.entered())

    def next(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Return the rows of the next micro-batch, which has to hold these tokens."""
        first = self.row
        self.row = self.row + len(tokens)
        names = (TOKENS, _MASK, _RESPONSE, ROUTES)
        batch = self.data.batch
        rows = {name: batch[name][first : self.row] for name in names if batch.get(name) is not None}
        MicroBatchError.unless(
            torch.equal(rows[TOKENS], tokens),
            "this micro-batch isn't the next one of the batch",
            "rows in the batch's order, whole",
            f"other tokens, {list(tokens.shape)}",
            "dynamic batching, which this strategy doesn't do; or a newer ROLL",
            where=f"rows {first} to {self.row - 1}",
        )
        return rows


def recorded(strategy: Any) -> torch.Tensor | None:
    """Return what the last `forward_step` recorded, [batch, sequence, layers, topk], if anything."""
    if (adapter := StrategyAdapter.of(strategy)) is None:
        return None
    recorded = adapter.recorded
    adapter.recorded = None
    return recorded  # type: ignore[no-any-return]


def _forward_step(original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    recorded(self)
    adapter = StrategyAdapter.of(self)
    if adapter is None or batch.meta_info.get("disable_adapter", False):  # a LoRA actor's reference pass
        return original(self, batch, *args, **kwargs)
    with adapter.running(batch, trains=False) as running:
        output = original(self, batch, *args, **kwargs)
    if running.taken:
        adapter.recorded = torch.cat(running.taken)
    return output


def _train_step(original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if (adapter := StrategyAdapter.of(self)) is None:
        return original(self, batch, *args, **kwargs)
    with adapter.running(batch, trains=True) as running:
        output = original(self, batch, *args, **kwargs)
    if running.job is not None:
        output.update(running.job.metrics)
    return output


def _clip_grad_norm(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    running = getattr(StrategyAdapter.of(self), "batch", None)
    if running is not None:
        running.open.close()
    return original(self, *args, **kwargs)


def _fsdp2_forward(original: Callable[..., Any], self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    running = getattr(StrategyAdapter.of(self), "batch", None)
    if running is None:
        return original(self, input_ids, *args, **kwargs)
    running.begin()
    job = current()
    rows = dict[str, Any]()
    with job.deferring(functions.GIVE):
        rows = running.next(input_ids)
        if job.action == REPLAY:
            _give(running.adapter, rows)
    logits = original(self, input_ids, *args, **kwargs)
    if job.action == RECORD and rows:
        from roll.utils.context_parallel import get_ulysses_group

        batch = tensors.BatchForm.of(rows[TOKENS], rows[_MASK], running.adapter.model)
        groups = [get_ulysses_group()] if self.worker.rank_info.cp_size > 1 else []
        record = job.opened(StepRecording)
        dtype = narrow_dtype(batch.model.num_experts)
        running.taken.append(functions.take(*record, batch, lambda: _layout(self, batch), groups, dtype))
    return logits


@functions.timed()
def _give(adapter: StrategyAdapter, rows: dict[str, Any]) -> None:
    MicroBatchError.unless(
        ROUTES in rows,
        "this micro-batch has no routes",
        f"{ROUTES} in the batch",
        ", ".join(rows),
        "R2: old log-probs aren't computed before the update (ROLL decides by the number of steps; "
        "enable_old_logprobs_recompute has to be true); R3: actor_infer isn't sglang with "
        "router_replay.mode: R3, the only engine of which ROLL takes routes",
    )
    replay, chunk = current().opened(StepReplay)
    mask = None
    if adapter.from_rollout:
        kept = [tokens_of[there.bool()] for tokens_of, there in zip(rows[TOKENS], rows[_MASK], strict=True)]
        mask = functions.build_r3_replay_mask(tensors.batched(kept, jagged=True), rows[_RESPONSE])
    routes = tensors.GivenRoutes.of(rows[ROUTES], rows[_MASK], adapter.model)
    functions.give(replay, chunk, routes, _layout(adapter.engine, routes.batch), mask)


def _layout(self: Any, batch: tensors.BatchForm) -> TokenLayout:
    """Return the layout of this rank's rows, by the mask and ROLL's own cut."""
    kept: Any = batch.kept  # ROLL pads
    place = self.worker.rank_info

    def fed(sequences: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.zeros(kept.shape, dtype=torch.int64, device="cpu")
        whole[kept] = torch.cat(sequences)
        here: torch.Tensor = self.get_feature_on_cp_rank(whole)[TOKENS] if place.cp_size > 1 else whole
        return here

    parallel = ParallelLayout(cp=place.cp_size, cp_rank=place.cp_rank)
    return TokenLayout.from_probe(fed, batch.lengths, order="batch", parallel=parallel)
