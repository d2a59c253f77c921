"""Adds R2 and R3 to verl's FSDP engines (fsdp, fsdp2); verl itself has them on Megatron and VeOmni.

verl puts routes into the engine's batch, and returns what a step puts into its model_output. So two methods
are wrapped: a pass opens a record or a replay of the whole model, and a step gives routes to the next
forward, or takes what it chose. Probing the engine's `prepare_model_inputs` with token numbers tells which
token sits in which row: packed, padded, or a piece of a sequence-parallel group.

Asks:     when verl's engine is imported, the names and arguments that it wraps or calls.
Changes:  `forward_backward_batch` and `disable_adapter` of FSDPEngine, `forward_step` of its language model.
Undone:   by `npu_replay.uninstall()`; engines that are alive go on as verl's own.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from npu_replay.compat.engines import setting
from npu_replay.compat.patching import import_hook, known_names
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import functions, tensors
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import RECORD, REPLAY, current, run, without_adapter
from npu_replay.compat.verl.files import IMAGES, ROUTES, TOKENS
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routers import find
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.replay import StepReplay

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_WHAT = "router replay of verl's FSDP engines"
_NEEDED = {
    "FSDPEngine.forward_backward_batch": ("data", "forward_only"),
    "FSDPEngine.disable_adapter": (),
    "FSDPEngineWithLMHead.forward_step": ("micro_batch",),
    "FSDPEngineWithLMHead.prepare_model_inputs": ("micro_batch",),
}
"""The names that are wrapped or called, and their arguments in use."""
_MOST_LAYOUTS = 128
"""The number of layouts kept for an engine, enough for a step's micro-batches. Each has 8 bytes a token."""

_patches = Patches(_WHAT)


def install() -> None:
    import_hook.when_imported(ENGINE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    known_names.check(module, _NEEDED, "verl's FSDP engine", "verl")
    base = module.FSDPEngine
    language_model = module.FSDPEngineWithLMHead
    one_pass = functools.partial(run, FsdpAdapter)
    _patches.wrap(base, "forward_backward_batch", one_pass, "one pass: ranks leave together, figures")
    _patches.wrap(language_model, "forward_step", _step, "gives and takes the routes of a micro-batch")
    _patches.wrap(base, "disable_adapter", without_adapter, "a reference pass is never replayed")


class WholeModelAdapter(EngineAdapter):
    """Adapts an engine whose model is one module of transformers.

    Attributes:
        strategy: named in the line that says that replay is on.
        layouts: of micro-batches, by what differs between them for the engine's preprocessing.
    """

    strategy: object = ""
    acts = True

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.layouts: dict[Any, TokenLayout] = {}
        self._model: RoutedModel | None = None

    @property
    def stack(self) -> str:  # type: ignore[override]
        release = getattr(sys.modules.get("transformers"), "__version__", "?")
        return f"transformers {release}, {str(self.strategy).upper()}"

    @property
    def chunks(self) -> list[nn.Module]:
        return [self.engine.module]

    @property
    def model(self) -> RoutedModel:
        """Return the model as its routers tell it; raises RouterError if it has none that can be replayed."""
        if self._model is None:
            routers = [router for chunk in find(self.chunks) for router in chunk]
            self._model = RoutedModel.of_module(self.chunks[0], routers)
        return self._model


class FsdpAdapter(WholeModelAdapter):
    """Adapts verl's FSDP engine."""

    @property
    def strategy(self) -> object:  # type: ignore[override]
        return setting(self.engine.engine_config, "strategy")

    @property
    def section(self) -> Any:
        """Return a plain dict, or None: verl's yaml has no such key."""
        return setting(self.engine.engine_config, "router_replay")


def _step(original: Any, self: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `forward_step`. An error waits for the end of the pass."""
    running = current()
    engine: Any = running.engine
    if engine is None or not running.flagged or engine.engine is not self:
        return original(self, micro_batch, *args, **kwargs)
    if running.action == REPLAY:
        with running.deferring(functions.GIVE):
            _give(engine, micro_batch)
    loss, output = original(self, micro_batch, *args, **kwargs)
    if running.action == RECORD:
        batch = tensors.BatchForm.of(micro_batch[TOKENS], None, engine.model)
        groups = [] if self.ulysses_parallel_group is None else [self.ulysses_parallel_group]
        layout = functools.partial(layout_of, self, micro_batch, engine.layouts)
        record = running.opened(StepRecording)
        dtype = narrow_dtype(engine.model.num_experts)
        output["model_output"][ROUTES] = functions.take(*record, batch, layout, groups, dtype)
    return loss, output


@functions.timed()
def _give(adapter: FsdpAdapter, micro_batch: Any) -> None:
    replay, chunk = current().opened(StepReplay)
    tokens = micro_batch[TOKENS]
    aligned = functions.align_r3_router_replay_data(micro_batch.get(ROUTES, None), tokens)
    mask = None
    if adapter.from_rollout:
        mask = functions.build_r3_replay_mask(tokens, micro_batch["response_mask"])
    routes = tensors.GivenRoutes.of(aligned, None, adapter.model)
    functions.give(replay, chunk, routes, layout_of(adapter.engine, micro_batch, adapter.layouts), mask)


def layout_of(engine: Any, micro_batch: Any, kept: dict[Any, TokenLayout]) -> TokenLayout:
    """Return the layout of this rank's rows, kept for the next micro-batch of the same lengths."""
    tokens = micro_batch[TOKENS]
    lengths = tuple(tensors.lengths_of(tokens))
    unpad = micro_batch.get("use_remove_padding", True)  # all else that verl's preprocessing reads stays
    key = (lengths, bool(getattr(unpad, "data", unpad)))
    if key in kept:
        return kept[key]
    size = int(engine.ulysses_sequence_parallel_size)
    rank = engine.ulysses_device_mesh["sp"].get_local_rank() if size > 1 else 0
    parallel = ParallelLayout(cp=size, cp_rank=rank)

    def fed(sequences: list[torch.Tensor]) -> torch.Tensor:
        """Return what the model's routers see of these sequences, by the engine's own preprocessing."""
        copy = micro_batch.clone(recurse=False)
        if IMAGES in copy.keys():  # noqa: SIM118  a TensorDict iterates over rows
            del copy[IMAGES]  # as large as all the rest, and no token
        numbers = torch.cat(sequences).to(tokens.device)
        copy[TOKENS] = torch.nested.nested_tensor_from_jagged(numbers, tensors.offsets(tokens))
        inputs, outputs = engine.prepare_model_inputs(micro_batch=copy)
        whole: torch.Tensor = inputs[TOKENS]
        piece = outputs["input_ids_rmpad_rolled"].numel()  # labels are always cut
        if size > 1 and whole.numel() == size * piece:
            # A model with images cuts its embeddings; what it is fed is whole.
            whole = whole[..., rank * piece : (rank + 1) * piece]
        return whole

    if len(kept) == _MOST_LAYOUTS:
        kept.clear()
    kept[key] = TokenLayout.from_probe(fed, lengths, order="batch", parallel=parallel)
    return kept[key]
