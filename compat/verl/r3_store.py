"""Passes R3's routes by reference: a rollout stores each sample's once, and a rank fetches its own layers.

A worker of agent loops puts them into Ray's object store, and verl moves only a mark a token, int16, and a
column of references, which goes with the samples (`batch_routes`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from npu_replay import delivery
from npu_replay.compat.engines import setting
from npu_replay.compat.megatron.parallel_state import decoder_layers
from npu_replay.compat.ray import RayCarrier
from npu_replay.compat.verl.batch_routes import COLUMN, MARK, REFUSED, RoutesByKey, by_reference
from npu_replay.compat.verl.config import ROOT
from npu_replay.compat.verl.rollout_checks import warn_seldom
from npu_replay.delivery.references import PATIENCE, fetch_each
from npu_replay.environment import DELIVERY
from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.rollout.admit import from_batch
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array
from npu_replay.routes.fingerprint import find_other_tokens, fingerprint

logger = logging.getLogger(__name__)

_STEPS = 3
"""The number of steps that a worker keeps what it has put: trainers may be that far behind."""
_SAMPLES = 4096
"""The number of samples that a worker keeps in a job that counts no steps."""
_SPLIT = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    "pipeline_model_parallel_layout",
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""The fields of a TransformerConfig about a split, which an override may leave out."""


class Putter:
    """Puts away what the samples of one worker of agent loops chose.

    With `keeps` references stay here until their step is long over, because a queue pickles them where
    Ray doesn't see it. Otherwise they live as long as the batch.
    """

    def __init__(self, carrier: RayCarrier, model: RoutedModel, *, keeps: bool) -> None:
        self._carrier = carrier
        self._model = model
        self._keeps = keeps
        self._kept: dict[int, list[delivery.Reference]] = {}

    @classmethod
    def of(cls, worker: Any, model: RoutedModel | None) -> Putter | None:
        """Return the putter of a worker; None where batches carry ids.

        Raises:
            ReplayError: an unknown model, or a metric that reads ids in batches.
        """
        if not by_reference():
            return None
        if model is None:
            raise ReplayError(
                "routes can't be put away: nothing says which layers of the model route",
                where=DELIVERY,
                expected="the policy's config.json, read by the worker of the agent loops",
                got="none",
                cause="a worker of one's own; leave the variable out, and batches carry the routes",
            )
        config = worker.config
        if interval := setting(config, "actor_rollout_ref", "rollout", "moe_load_balance_metrics_interval"):
            raise ReplayError(
                "verl's MoE load metrics read ids in batches, which have none",
                where="actor_rollout_ref.rollout.moe_load_balance_metrics_interval",
                expected=f"0, or no {DELIVERY}",
                got=interval,
            )
        cut = cut_of(config, model)
        return cls(RayCarrier(cut=cut), model, keeps=queues(worker))

    def put_away(self, output: Any, step: int | None) -> None:
        """Replace the routes of an agent loop's output by marks and a reference; without a step drop them."""
        rows = output.routed_experts
        output.routed_experts = None
        if rows is not None and step is not None:
            version = output.extra_fields.get("max_global_steps")
            step = version if step < 0 and version is not None else step  # a trainer that counts none
            tokens = np.asarray([*output.prompt_ids, *output.response_ids], np.int64)
            output.routed_experts, output.extra_fields[COLUMN] = self.put(rows, tokens, step)

    def put(self, rows: Array, tokens: Array, step: int) -> tuple[Array, delivery.Reference | None]:
        """Put the rows of one sample away; return its marks, int16 [tokens, 1, 1], and the reference.

        Routes that can't be right are not put: the trainer counts the sample as a bad one.
        """
        reference = None
        try:
            routes = from_batch(torch.from_numpy(rows), self._model, zeros_are_none=True, tokens=tokens)
        except (InvalidRoutes, MicroBatchError) as error:
            warn_seldom("%d samples so far go without their routes: %s", error)
        else:
            reference = self._carrier.put(routes.sequence(0, len(routes), fingerprint(tokens)), step=step)
            if self._keeps:
                kept = self._kept.setdefault(step, [])
                kept.append(reference)
                if step < 0:
                    del kept[:-_SAMPLES]
                self._kept = {put_at: those for put_at, those in self._kept.items() if put_at > step - _STEPS}
        mark = REFUSED if reference is None else MARK
        return np.full((len(rows), 1, 1), mark, np.int16), reference


def queues(worker: Any) -> bool:
    """Return whether a worker of agent loops hands its samples to a queue (TransferQueue)."""
    # By name: it is in verl.trainer.ppo.v1.agent_loop_tq, in 0.8 in main_ppo_sync, which may be __main__.
    return any(kind.__name__ == "AgentLoopWorkerTQ" for kind in type(worker).__mro__)


def cut_of(config: Any, model: RoutedModel) -> Any:
    """Return the `cut` of a carrier: a piece a stage; even ones, with a WARNING, if it is unknown."""
    megatron = setting(config, ROOT, "actor", "megatron")
    pp, vp = (int(setting(megatron, f"{name}pipeline_model_parallel_size") or 1) for name in ("", "virtual_"))
    moe = [int(layer in model.layers) for layer in range(model.num_layers)]
    settings = {"num_layers": model.num_layers, "num_moe_experts": model.num_experts, "moe_layer_freq": moe}
    try:
        override = dict(setting(megatron, "override_transformer_config") or {})
        megatron_config = SimpleNamespace(**settings | dict.fromkeys(_SPLIT) | override)
        if (layout := megatron_config.pipeline_model_parallel_layout) is not None:
            from megatron.core.transformer import pipeline_parallel_layer_layout as layouts

            stages = layout if isinstance(layout, str) else [list(stage) for stage in layout]
            megatron_config.pipeline_model_parallel_layout = layouts.PipelineParallelLayerLayout(stages, pp)
        decoder = decoder_layers(megatron_config)
        chunks = vp if decoder.table is None else len(decoder.table[0])
        cut = ParallelLayout(pp=pp, vp=chunks, decoder=decoder)
        cut.moe_layers  # noqa: B018  raises if they can't be dealt out
    except (ReplayError, ImportError, AssertionError, TypeError, ValueError) as error:
        even = -(-len(model.layers) // max(1, pp * vp))
        words = (
            "[npu_replay] rollout: routes are put away in pieces of %d layers, and a stage may need two, "
            "since the split of the actor's pipeline isn't known: %s"
        )
        logger.warning(words, even, error)
        return even
    return cut


class R3Store:
    """Fetches the routes that the batches of one engine refer to, once for all passes of a step."""

    def __init__(self, store: RoutesByKey) -> None:
        self._held = store
        self._batches = 0

    def receive(
        self,
        references: Sequence[delivery.Reference | None],
        tokens: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[int, InvalidRoutes]:
        """Fetch the samples' routes and drop older steps; return by key why some have none.

        With `tokens`, the token ids by key, only samples in it are read.
        """
        known = {reference.key: reference for reference in references if reference is not None}
        asked = [reference for key, reference in known.items() if tokens is None or key in tokens]
        lacking = {*self._held.lacking(reference.key for reference in asked)}
        wanted = [reference for reference in asked if reference.key in lacking]
        # Without steps, each batch that has only new samples counts as one.
        self._batches += len(wanted) == len(asked) > 0
        steps = {
            reference.key: self._batches if reference.step < 0 else reference.step for reference in asked
        }
        oldest = [
            reference.step if reference.step >= 0 else self._batches - _STEPS + 1 for reference in asked
        ]
        self._held.drop_before(min(oldest, default=0), steps)
        for reference, routes in zip(wanted, fetch_each(wanted, self._held.layers, PATIENCE), strict=True):
            if tokens is not None:  # refuse routes of a sample with other token ids
                mark = fingerprint(tokens[reference.key])
                other = find_other_tokens(
                    reference.tokens, reference.fingerprint, len(tokens[reference.key]), mark
                )
                routes = routes if other is None else other.error(InvalidRoutes, repr(reference))
            self._held.keep(reference.key, routes, steps[reference.key])
        return self._held.bad(steps)
