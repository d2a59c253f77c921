"""Answers verl's functions of router replay from the current pass, with their names, arguments and results.

Functions that a release lacks are not added. Outside an engine's pass verl's own run (`install`), and each
router records or replays by the action of its RouterReplay, as after verl's own patch. Megatron's router asks
that from 0.16 on, and the seam before (`megatron_backports.router_init`), so no routing is patched.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from npu_replay.compat.megatron.routers import IDLE_WITHOUT_ACTION
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.patching import known_names
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import tensors
from npu_replay.compat.verl.engine_adapter import Problem
from npu_replay.compat.verl.engine_pass import BACKWARD, RECORD, REPLAY, current, serves
from npu_replay.errors import MicroBatchError, ReplayError, RouterError
from npu_replay.parallel.collect import collect
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.routes.fingerprint import find_other_length
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.replay import StepReplay

logger = logging.getLogger(__name__)

GIVE = "give this micro-batch its routes"
"""What a rank can't do, in an error that others are told of."""


def served(ours: Callable[..., Any], theirs: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return a function that is `ours` while an engine's pass runs, and verl's own elsewhere.

    Raises:
        ReplayError: verl's takes an argument that ours doesn't know; `where` names its place.
    """
    if more := inspect.signature(theirs).parameters.keys() - inspect.signature(ours).parameters.keys():
        known = f"{theirs.__name__} with known arguments"
        raise known_names.unknown(
            "router replay of verl", where, known, f"also {', '.join(sorted(more))}", "verl"
        )

    @functools.wraps(theirs)
    def served(*args: Any, **kwargs: Any) -> Any:
        return (ours if serves() else theirs)(*args, **kwargs)

    return served


@contextmanager
def timed() -> Iterator[None]:
    """Add the time of a block, or of each call of a function, to the current pass."""
    started = time.perf_counter()
    try:
        yield
    finally:
        current().count(microseconds=int((time.perf_counter() - started) * 1e6))


def merge_router_topk_indices(
    attention_mask: torch.Tensor | None,
    input_ids: torch.Tensor,
    mini_layer_topk_idx_list: list[torch.Tensor],
    tf_config: Any,
    vp_rank: int | None = None,
    local_cp_size: int | None = None,
    model: Any = None,
) -> None:
    """Append what a chunk's routers chose in its last forward, for the whole sequences of the micro-batch.

    Shaped [batch, sequence, layers of the chunk, topk], or jagged. Every rank of the chunk's tensor and
    context parallel group has to call it. An error waits for the end of the schedule; rows are blank then.
    """
    batch = tensors.BatchForm.of(input_ids, attention_mask, tf_config, local_cp_size)
    groups = []  # over which the rows of one stage are spread
    if dist.is_initialized():
        from megatron.core import parallel_state

        groups = [parallel_state.get_tensor_and_context_parallel_group()]
        if local_cp_size is not None:
            dynamic = parallel_state.get_dynamic_data_context_parallel_groups(group_size=local_cp_size)
            groups = [parallel_state.get_tensor_model_parallel_group(), dynamic]
    dtype, as_bytes = tensors.wire_dtype(tf_config, keys=current().keeps)
    merged = take(
        *current().opened(StepRecording, model, vp_rank), batch, lambda: layout_of(batch), groups, dtype
    )
    mini_layer_topk_idx_list.append(tensors.viewed(merged, torch.uint8) if as_bytes else merged)


def layout_of(batch: tensors.BatchForm) -> TokenLayout:
    """Return the layout of this rank's rows, by verl's packing.

    Raises:
        MicroBatchError: the engine pads instead, and its rows are others than the packed ones.
    """
    engine: Any = current().engine
    if engine.pads:
        batch.check_padded(to_mini_batch=engine.pads_to_mini_batch)
    return batch.layout()


@timed()
def take(
    session: StepRecording,
    chunk: int,
    batch: tensors.BatchForm,
    layout_of: Callable[[], TokenLayout],
    groups: Sequence[Any],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a chunk's last choice for a batch, ids or keys; every rank of the groups has to call it."""
    running: Any = current()
    whole: list[RoutedExperts] = []
    if labels := [router.label for router in session.routers[chunk]]:
        layouts = []
        routes = []
        with Problem("lay out what it recorded") as problem:
            layouts.append(layout_of())
            routes.append(session.take(chunk))
        try:
            # A stage's ranks run micro-batches together; only a checkpoint or a slow step separates them.
            whole = collect(routes, layouts, groups, patience=600.0, error=problem.error) or []
        except ReplayError as error:
            # Raised after the schedule, in which other ranks wait for this one; the rows are blank.
            running.defer(error)
            whole = [RoutedExperts.unrecorded(size, layers=labels, **batch.sizes) for size in batch.lengths]
    if not running.keeps:
        return batch.filled(whole, dtype)
    return batch.keyed(running.engine.r2.keep(chunk, len(batch.lengths), whole))


def reorder_and_merge_vpp_layers(
    micro_batch_tensor_list: list[torch.Tensor],
    num_microbatches: int,
    vpp_size: int,
    microbatch_group_size_per_vp_stage: int,
) -> torch.Tensor:
    """Sort the merged forwards of an interleaved schedule: [all samples, sequence, all layers, topk]."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(num_microbatches, vpp_size, microbatch_group_size_per_vp_stage)
    MicroBatchError.unless(
        len(micro_batch_tensor_list) == len(table),
        "the recorded forwards don't match the interleaved schedule",
        expected=f"{len(table)}: {num_microbatches} micro-batches of {vpp_size} chunks",
        got=len(micro_batch_tensor_list),
        cause="a chunk whose forwards weren't recorded, or a schedule with another group size",
    )
    keeps = current().keeps  # each chunk has the same keys
    of_chunk: list[list[torch.Tensor]] = [[] for _ in range(vpp_size)]
    for (_, chunk), tensor in zip(table, micro_batch_tensor_list, strict=True):
        of_chunk[chunk].extend(tensor.unbind())
    samples = [parts[0] if keeps else torch.cat(parts, dim=1) for parts in zip(*of_chunk, strict=True)]
    return tensors.batched(samples, jagged=micro_batch_tensor_list[0].is_nested)


@timed()
def pp_gather(local_layers_router_map: torch.Tensor, tf_config: Any) -> torch.Tensor:
    """Gather the MoE layers of all pipeline stages, in order; on the CPU.

    Every rank of the pipeline has to call it, also one without MoE layers. An error on one is raised on all.
    """
    dtype, as_bytes = tensors.wire_dtype(tf_config, keys=current().keeps)
    if int(tf_config.pipeline_model_parallel_size) > 1 and not current().keeps:
        whole = _of_all_stages(local_layers_router_map, tf_config)
    else:
        whole = local_layers_router_map.detach().cpu()
    return tensors.viewed(whole, dtype) if as_bytes else whole


def _of_all_stages(local: torch.Tensor, config: Any) -> torch.Tensor:
    """Gather decoder layers, one a column, chunk by chunk, and sort them by their labels."""
    from megatron.core import parallel_state

    labels: list[int] = []
    samples: list[Any] = []
    with Problem("gather its layers") as problem:  # the other stages wait to hear of it
        samples = [sample.numpy() for sample in local.detach().cpu().unbind()]
        parallel = tensors.parallel_of(config)
        moe = {*parallel.moe_layers}
        labels = [layer for chunk in parallel.chunk_layers for layer in chunk if layer in moe]
        columns = samples[0].shape[1] if samples else len(labels)
        if columns != len(labels):
            raise MicroBatchError(f"{columns} recorded layers for the {len(labels)} MoE layers of this stage")
    failure = problem.error and problem.error.line
    group = parallel_state.get_pipeline_model_parallel_group()
    everyone_has: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone_has, (labels, samples, failure), group)
    for rank, (_, _, theirs) in enumerate(everyone_has):
        if theirs is not None:
            raise MicroBatchError(theirs, where=f"pipeline rank {rank}") from problem.error
    order = np.argsort([label for stage, _, _ in everyone_has for label in stage], kind="stable")
    whole = [
        torch.from_numpy(np.concatenate(parts, axis=1)[:, order])
        for parts in zip(*(theirs for _, theirs, _ in everyone_has), strict=True)
    ]
    return tensors.batched(whole, jagged=local.is_nested)


@timed()
def set_router_replay_data(
    layers_topk_idx: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    tf_config: Any,
    vp_rank: int | None = None,
    replay_mask: torch.Tensor | None = None,
    local_cp_size: int | None = None,
    model: Any = None,
) -> None:
    """Give a chunk the routes of its next forward, from those of whole sequences.

    Shaped [batch, sequence, layers, topk], or jagged, of all decoder layers or the MoE layers; `replay_mask`
    are the rows to replay. Routes that are missing or don't fit are an error at the end of the schedule.
    """
    replay, chunk = current().opened(StepReplay, model, vp_rank)
    if not replay.labels(chunk):
        return
    with current().deferring(GIVE):
        routes = tensors.GivenRoutes.of(layers_topk_idx, attention_mask, tf_config, local_cp_size)
        give(replay, chunk, routes, layout_of(routes.batch), replay_mask)


def give(
    replay: StepReplay,
    chunk: int,
    routes: tensors.GivenRoutes,
    layout: TokenLayout,
    mask: torch.Tensor | None,
) -> None:
    """Give a chunk the routes of its next forward, those of a jagged mask's rows, and count them.

    Raises:
        ReplayError: routes that can't be used, where none is tolerated.
    """
    running: Any = current()
    engine = running.engine
    good, problems = routes.routes(mask=mask, from_rollout=engine.from_rollout, store=engine.routes)
    problems |= getattr(routes.ids, _BAD, {})
    samples = len(good | problems)
    # The mask of a sample that verl has rejected, or that has no response, is empty.
    wanted = [True] * samples if mask is None else [row.any() for row in mask.unbind()]
    bad = {number: error for number, error in problems.items() if wanted[number]}
    if bad and not running.tolerant:
        raise bad[min(bad)]
    for number, error in bad.items():
        logger.warning("[npu_replay] sample %d takes the routers' own choice: %s", number, error)
    good = {number: routes_of_sample for number, routes_of_sample in good.items() if number not in problems}
    here = layout.rows_of(good, layers=replay.labels(chunk), **routes.batch.sizes)
    # Each pass decodes its batch anew, so nothing says which weights the rollout engine had.
    replay.give(chunk, here.with_known(made_at=0.0))
    if chunk == replay.first_chunk:
        running.count(rows=int((layout.rows >= 0).sum()), routed=int(here.recorded.sum()))
        if tensors.speaks_for_samples(layout.parallel):
            running.count(samples=samples, bad_samples=len(bad))


def build_r3_replay_mask(input_ids: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the rows to replay, bool, jagged: all but the last of each sequence that has a response."""
    lengths = tensors.lengths_of(input_ids)
    each = [
        (torch.arange(length, device="cpu") < length - 1) & bool(response.any())
        for length, response in zip(lengths, response_mask.unbind(), strict=True)
    ]
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(each).to(input_ids.device), tensors.offsets(input_ids)
    )


def align_r3_router_replay_data(
    layers_topk_idx: torch.Tensor | None, input_ids: torch.Tensor
) -> torch.Tensor | None:
    """Return one row of routes for each token, zeros for a last token that has none.

    None where none came, as verl 0.9.0 doesn't look: `set_router_replay_data` reports it.
    """
    if layers_topk_idx is None:
        return None
    lengths = tensors.lengths_of(input_ids)
    aligned = []
    bad = {}
    for number, (routes, length) in enumerate(zip(layers_topk_idx.unbind(), lengths, strict=True)):
        wrong_length = find_other_length(len(routes), length)
        if wrong_length is not None:
            bad[number] = wrong_length.error(MicroBatchError, f"sample {number} of the micro-batch")
            routes = routes[:0]
        aligned.append(torch.cat([routes, routes.new_zeros(length - len(routes), *routes.shape[1:])]))
    whole = tensors.batched(aligned, jagged=True)
    # Other ranks wait in the schedule, so no error is raised here: set_router_replay_data reports it.
    setattr(whole, _BAD, bad)
    return whole


_BAD = "npu_replay_bad_samples"
"""The attribute of aligned routes with the errors of samples that couldn't be aligned, by number."""


def set_global_router_replay_action(router_replay_action: Any) -> None:
    """Begin a record or a replay, by an action of verl's enum, Megatron's or another with their values."""
    value = getattr(router_replay_action, "value", "")
    RouterError.unless(
        value in (RECORD, REPLAY, BACKWARD),
        "this is no action of a RouterReplay",
        expected="RouterReplayAction.RECORD, REPLAY_FORWARD or REPLAY_BACKWARD; clear_..._action() for none",
        got=router_replay_action,
    )
    if value != BACKWARD:  # autograd tells a backward
        current().set(value)


def clear_global_router_replay_action() -> None:
    current().clear()


def clear_global_indices() -> None:
    """Do nothing: a pass keeps what was recorded and given by itself."""


def set_model_router_replay_action(model: Any, router_replay_action: Any) -> None:
    """Do nothing: a forward step tells forward from backward by it; here autograd does."""


def get_micro_batch_router_list(tf_config: Any, vp_rank: int | None = None) -> list[Any]:
    """Return no RouterReplay: a forward step of verl below 0.9 sets the actions of these."""
    return []


def is_r2_record_action(tf_config: Any, vp_rank: int | None = None, model: Any = None) -> bool:
    """Return whether a record is on; also on a dense stage, whose ranks join the gathering."""
    return current().action == RECORD


def is_replay_forward_action(tf_config: Any, vp_rank: int | None = None, model: Any = None) -> bool:
    return current().action == REPLAY


def is_replay_backward_action(tf_config: Any, vp_rank: int | None = None, model: Any = None) -> bool:
    """Return False: a replay is ready for a forward at any time."""
    return False


def complete(kind: Any, actions: Any, patches: Patches) -> None:
    """Let Megatron's routers ask verl's RouterReplay (`kind`), and let it take Megatron's actions too."""

    def set_router_replay_action(original: Any, self: Any, action: Any) -> None:
        original(self, None if action is None else actions(getattr(action, "value", action)))

    patches.set(kind, IDLE_WITHOUT_ACTION, True, "without an action a router need not ask it")
    patches.wrap(kind, "set_router_replay_action", set_router_replay_action, "takes Megatron's actions too")


def get_replay_topk(
    self: Any,
    scores: torch.Tensor,
    topk: int,
    num_groups: int | None = None,
    group_topk: int | None = None,
    default_compute_topk: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a router's top-k under its action, as verl's own patch of the routing does."""
    action = getattr(self.router_replay_action, "value", None)
    ids = None
    if action == REPLAY:
        ids = self.target_topk_idx
    elif action == BACKWARD and self.replay_backward_list:
        ids = self.replay_backward_list.pop(0)
    if ids is not None:
        ids = ids.to(scores.device, torch.int64)
        return scores.gather(1, ids), ids
    values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
    if action == RECORD:
        self.record_indices(ids)
    return values, ids


def made_for(kind: Any, router: Any) -> Any:
    """Make a router's RouterReplay, which leaves verl's list when the router is garbage."""
    made = _asked_by_megatron(kind)()
    router_init.leave_with(router, made, kind, "router_instances")
    return made


@functools.cache
def _asked_by_megatron(kind: Any) -> Any:
    """Return verl's class with `get_replay_topk`, which it lacks below 0.9.

    Megatron's routers, unpatched, ask it, and those that are alive do so after an uninstall(), too.
    """
    if hasattr(kind, "get_replay_topk"):
        return kind
    return type(kind.__name__, (kind,), {"get_replay_topk": get_replay_topk})
