"""verl's FSDP engines (strategies fsdp and fsdp2): R2 and R3, which verl itself has on Megatron and VeOmni.

Routes are in the engine's batch by verl's own doing, and what is put into a step's model_output comes back to
the trainer as log-probs do. So two methods are wrapped: a pass opens a record or a replay of the whole model,
and a step gives routes to the next forward, or takes what it chose. Which token sits in which row is read off
the engine's own `prepare_model_inputs`: packed, padded, a piece of a sequence-parallel group.

Waits for the module of verl's engine. Probes: the names and arguments that it wraps. Offers: `install`.
Undone by `npu_replay.uninstall()`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay import environment
from npu_replay.compat.patching import import_hook, known_names
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import engine, functions, tensors
from npu_replay.compat.verl.actions import RECORD, REPLAY, problem_of, switch, without_adapter
from npu_replay.compat.verl.config import FSDP, OFF
from npu_replay.compat.verl.files import IMAGES, ROUTES, TOKENS
from npu_replay.compat.verl.settings import ROOT, setting, without_keys
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routers import find
from npu_replay.routes.routed_experts import narrow_dtype

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_WHAT = "router replay of verl's FSDP engines"
_NEEDED = {
    "FSDPEngine.forward_backward_batch": ("data", "forward_only"),
    "FSDPEngine.disable_adapter": (),
    "FSDPEngineWithLMHead.forward_step": ("micro_batch",),
    "FSDPEngineWithLMHead.prepare_model_inputs": ("micro_batch",),
}
"""What is wrapped or called, and which of its arguments."""
_MOST_LAYOUTS = 128
"""Layouts that are kept of an engine: those of a step's micro-batches. Each has 8 bytes a token."""

_patches = Patches(_WHAT)
_models: WeakKeyDictionary[nn.Module, RoutedModel] = WeakKeyDictionary()
_layouts: WeakKeyDictionary[Any, dict[Any, TokenLayout]] = WeakKeyDictionary()


def install() -> None:
    """Wrap verl's FSDP engine, now or when it is imported."""
    if environment.disabled():
        return
    import_hook.when_imported(ENGINE, _WHAT, _wrap)
    if any(_patches):
        engine.restore_engines("FSDP")


def _wrap(module: Any) -> None:
    known_names.check(module, _NEEDED, "verl's FSDP engine", "verl")
    base, language_model = module.FSDPEngine, module.FSDPEngineWithLMHead
    asked = engine.Asked(
        lambda self: [self.module], settings_of, lambda self: model_of(self.module), _stack_of, kind="FSDP"
    )
    ours = engine.wrapped(_with_action(base.forward_backward_batch), asked)
    _patches.set(base, "forward_backward_batch", ours, "one pass: ranks leave together, figures")
    _patches.wrap(language_model, "forward_step", _step, "gives and takes the routes of a micro-batch")
    _patches.wrap(base, "disable_adapter", without_adapter, "a reference pass is never replayed")


# What is known of an engine


def settings_of(engine: Any) -> SimpleNamespace:
    """Its router_replay settings. The user's line makes a plain dict of them: verl's yaml has no such key."""
    names = ("mode", "record_file", "replay_file")
    config = engine.engine_config
    bare = without_keys(setting(config, "router_replay"), f"{ROOT}.actor.fsdp_config.router_replay")
    if bare is not None:
        raise bare
    found = {name: setting(config, "router_replay", name) for name in names}
    known = setting(config, "strategy") in FSDP  # FSDP-Turbo cuts its batches otherwise
    return SimpleNamespace(**found | {"mode": (known and found["mode"]) or OFF})


def model_of(module: nn.Module) -> RoutedModel:
    """A model of transformers, by the routers that are in it.

    Raises:
        RouterError: it has none, or such as can't be replayed.
    """
    if module not in _models:
        routers = [router for chunk in find([module]) for router in chunk]
        _models[module] = RoutedModel.of_module(module, routers)
    return _models[module]


def _stack_of(engine: Any) -> str:
    return stack_of(setting(engine.engine_config, "strategy"))


def stack_of(strategy: object) -> str:
    """What such a job runs on, for the line that says that replay is on."""
    release = getattr(sys.modules.get("transformers"), "__version__", "?")
    return f"transformers {release}, {str(strategy).upper()}"


# A pass


def _with_action(original: Callable[..., Any]) -> Any:
    """`forward_backward_batch` with the action that verl's Megatron engine sets in its own."""

    @functools.wraps(original)
    def acting(self: Any, *args: Any, **kwargs: Any) -> Any:
        job = switch.job
        if job is None or not job.flagged:
            return original(self, *args, **kwargs)
        switch.set(REPLAY if job.r3 or job.trains else RECORD)
        try:
            return original(self, *args, **kwargs)
        finally:
            switch.clear()

    return acting


def _step(original: Any, self: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """`forward_step`. An error waits for the end of the pass: the other ranks are in its collectives."""
    job = switch.job
    if job is None or not job.flagged or job.chunks[0] is not self.module:
        return original(self, micro_batch, *args, **kwargs)
    if switch.is_(REPLAY):
        problem = problem_of("give this micro-batch its routes", _give, self, micro_batch)
        if problem is not None:
            switch.defer(problem)
    loss, output = original(self, micro_batch, *args, **kwargs)
    if switch.is_(RECORD):
        output["model_output"][ROUTES] = _taken(self, micro_batch)
    return loss, output


@functions.timed
def _give(self: Any, micro_batch: Any) -> None:
    """Give the model the routes of its next forward."""
    replay, chunk = switch.replaying(None, None, None)
    routes = functions.present(micro_batch.get(ROUTES, None))
    aligned = functions.align_r3_router_replay_data(routes, micro_batch[TOKENS])
    mask = None
    if switch.job is not None and switch.job.r3:
        mask = functions.build_r3_replay_mask(micro_batch[TOKENS], micro_batch["response_mask"])
    batch = tensors.MicroBatch(aligned, None, model_of(self.module))
    functions.give(replay, chunk, batch, layout_of(self, micro_batch), mask)


@functions.timed
def _taken(self: Any, micro_batch: Any) -> torch.Tensor:
    """What the routers chose in the last forward, for whole sequences: jagged [tokens, layers, topk]."""
    record, chunk = switch.recording(None, None, None)
    model = model_of(self.module)
    batch = tensors.MicroBatch(micro_batch[TOKENS], None, model)
    group = self.ulysses_parallel_group
    groups = [] if group is None else [group]
    found = functions.collected(record, chunk, batch, lambda: layout_of(self, micro_batch), groups)
    return functions.handed_on(batch, chunk, found, narrow_dtype(model.num_experts))


# The rows of a micro-batch


def layout_of(engine: Any, micro_batch: Any) -> TokenLayout:
    """The rows of this rank's routers; kept for the next micro-batch of such lengths."""
    size = int(engine.ulysses_sequence_parallel_size)
    rank = engine.ulysses_device_mesh["sp"].get_local_rank() if size > 1 else 0
    lengths = tuple(tensors.MicroBatch(micro_batch[TOKENS], None, None).lengths)
    # All that verl's preprocessing goes by.
    padding = [getattr(engine, name, None) for name in ("pad_to_length", "pad_to_length_bucket")]
    unpad = micro_batch.get("use_remove_padding", True)
    key = (lengths, size, rank, bool(getattr(unpad, "data", unpad)), *padding)
    kept = _layouts.setdefault(engine, {})
    if key in kept:
        kept[key] = kept.pop(key)  # the last that was asked for goes last
    else:
        parallel = ParallelLayout(cp=size, cp_rank=rank)
        fed = functools.partial(_fed, engine, micro_batch, parallel)
        kept[key] = TokenLayout.from_probe(fed, lengths, order="batch", parallel=parallel)
        if len(kept) > _MOST_LAYOUTS:
            del kept[next(iter(kept))]
    return kept[key]


def _fed(
    engine: Any, micro_batch: Any, parallel: ParallelLayout, sequences: list[torch.Tensor]
) -> torch.Tensor:
    """What the model's routers see of these sequences, by the engine's own preprocessing."""
    tokens = micro_batch[TOKENS]
    copy = micro_batch.clone(recurse=False)
    if IMAGES in copy.keys():  # noqa: SIM118  a TensorDict iterates over rows
        del copy[IMAGES]  # as large as all the rest, and no token
    numbers = torch.cat(sequences).to(tokens.device)
    copy[TOKENS] = torch.nested.nested_tensor_from_jagged(numbers, tensors.offsets(tokens))
    inputs, outputs = engine.prepare_model_inputs(micro_batch=copy)
    fed: torch.Tensor = inputs[TOKENS]
    piece = outputs["input_ids_rmpad_rolled"].numel()  # of the labels, which are cut in any case
    if parallel.cp > 1 and fed.numel() == parallel.cp * piece:
        # A model with images cuts its embeddings; what it is fed is whole.
        fed = fed[..., parallel.cp_rank * piece : (parallel.cp_rank + 1) * piece]
    return fed
