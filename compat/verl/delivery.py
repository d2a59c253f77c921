"""Each id once, on verl's road: a batch has a mark a token in the place of routes, and a reference a sample.

A worker of agent loops puts a sample's routes away (`npu_replay.delivery`), the ranks of an engine fetch
their layers before a pass, and verl moves only what stands for them: one int16 a token, which goes wherever a
row of routes goes (padded, cut, packed, reordered), and a column of references, which goes with the samples.
While an engine runs a pass it has a key of five int16 in the place of each mark; R2's batches bring keys.

Switched on by NPU_REPLAY_DELIVERY=ray in the environment of the workers of agent loops. Probes nothing.
Offers: `Putter` to the rollout, `arrived` to an engine's pass, `routes_of` to its micro-batches. It changes
nothing by itself.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from npu_replay import delivery
from npu_replay.compat.ray import RayCarrier
from npu_replay.compat.verl.actor_pipeline import cut_of
from npu_replay.compat.verl.recorded import recorded
from npu_replay.compat.verl.settings import setting
from npu_replay.delivery.fetching import PATIENCE, fetch_each
from npu_replay.environment import DELIVERY, read
from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError
from npu_replay.rollout.batch_rows import from_batch
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array
from npu_replay.routes.fingerprint import find_other_tokens, fingerprint
from npu_replay.routes.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)

COLUMN = "npu_replay_routes"
"""The column of references."""
_MARK = 32767
"""The first of a token's five numbers: no id, no padding, and too large for a byte, which verl 0.7 and 0.8
make of a batch's numbers where all of them fit."""
_REFUSED = _MARK - 1
"""The same of a sample whose routes the door refused."""
_STAYED = 1
"""The key of a sample whose reference didn't come along."""
_WORDS = 5
_FIELDS = "extra_fields"
_QUEUED = "verl.trainer.ppo.v1.agent_loop_tq"
"""verl's workers that hand samples to a queue (TransferQueue)."""
_STEPS = 3
"""Of the job, for which a worker keeps what it has put: trainers may be so many steps behind."""
_SAMPLES = 4096
"""The same of a job that says no steps: so many samples of a worker."""
_refused = itertools.count(1)
Routes = RoutedExperts | InvalidRoutes
"""Of a sample; or why there are none."""


# The rollout's side


class Putter:
    """Puts away what the samples of one worker of agent loops chose.

    Args:
        carrier: where.
        model: the policy's.
        keeps: are references kept here until their step is long over? A queue pickles them where Ray doesn't
            see it. Otherwise they live as long as the batch.
    """

    def __init__(self, carrier: RayCarrier, model: RoutedModel, *, keeps: bool) -> None:
        self._carrier, self._model, self._keeps = carrier, model, keeps
        self._kept: dict[int, list[delivery.Reference]] = {}

    @classmethod
    def of(cls, worker: Any, model: RoutedModel | None) -> Putter | None:
        """That of a worker; None where batches carry ids.

        Raises:
            ReplayError: an unknown model, or a metric that reads ids in batches.
        """
        if not read(DELIVERY):
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
        queued = any(kind.__module__ == _QUEUED for kind in type(worker).__mro__)
        return cls(RayCarrier(cut=cut), model, keeps=queued)

    def put_away(self, output: Any, step: int | None) -> None:
        """The routes of an agent loop's output, which has keys and a reference then; none without a step."""
        rows, output.routed_experts = output.routed_experts, None
        if rows is not None and step is not None:
            version = output.extra_fields.get("max_global_steps")
            step = version if step < 0 and version is not None else step  # a trainer that counts none
            tokens = np.asarray([*output.prompt_ids, *output.response_ids], np.int64)
            output.routed_experts, output.extra_fields[COLUMN] = self.put(rows, tokens, step)

    def put(self, rows: Array, tokens: Array, step: int) -> tuple[Array, delivery.Reference | None]:
        """Put the rows of one sample away; what its batch has: int16 [tokens, 1, 1], and the reference.

        Routes that can't be right are not put: the trainer counts the sample as a bad one.

        Args:
            rows: [tokens, columns, topk], zeros for a token without a route.
            tokens: [tokens], their ids.
            step: of the job, for which it was sampled.

        Raises:
            ReplayError: Ray can't take them.
        """
        reference = None
        try:
            routes = from_batch(torch.from_numpy(rows), self._model, zeros_are_none=True, tokens=tokens)
        except (InvalidRoutes, MicroBatchError) as error:
            if (count := next(_refused)).bit_count() == 1:
                said = "[npu_replay] rollout: %d samples so far go without their routes: %s"
                logger.warning(said, count, error)
        else:
            reference = self._carrier.put(routes.sequence(0, len(routes), fingerprint(tokens)), step=step)
            if self._keeps:
                self._keep(reference, step)
        mark = _REFUSED if reference is None else _MARK
        return np.full((len(rows), 1, 1), mark, np.int16), reference

    def _keep(self, reference: delivery.Reference, step: int) -> None:
        kept = self._kept.setdefault(step, [])
        kept.append(reference)
        if step < 0:
            del kept[:-_SAMPLES]
        for old in [one for one in self._kept if one <= step - _STEPS]:
            del self._kept[old]


# An engine's side


class Arrived:
    """Routes that this process has fetched, of this rank's layers: for all passes of a step."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Routes]] = {}
        self._batches = 0
        self.carried: dict[int, Routes] = {}
        """Those of the pass that runs, whose batch had the ids itself."""
        self.layers: tuple[int, ...] = ()

    def receive(
        self,
        references: Sequence[delivery.Reference | None],
        layers: Sequence[int],
        tokens: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[int, InvalidRoutes]:
        """Have the routes of these samples here; what is of an older step than all of them goes.

        Args:
            references: of a batch's samples.
            layers: this rank's.
            tokens: by key, the token ids of those samples that have keys; others aren't read then.

        Returns:
            By key, why samples have none.
        """
        self.has(layers)
        known = {one.key: one for one in references if one is not None}
        given = [one for key, one in known.items() if tokens is None or key in tokens]
        wanted = [one for one in given if one.key not in self._held]
        # Without a step, each batch of other samples alone is taken for one.
        self._batches += len(wanted) == len(given) > 0
        steps = {one.key: self._batches if one.step < 0 else one.step for one in given}
        oldest = min((one.step if one.step >= 0 else self._batches - _STEPS + 1 for one in given), default=0)
        held = {key: (steps.get(key, step), one) for key, (step, one) in self._held.items()}
        self._held = {key: one for key, one in held.items() if one[0] >= oldest}
        for one, routes in zip(wanted, fetch_each(wanted, self.layers, PATIENCE), strict=True):
            other = None if tokens is None else _other_tokens(one, tokens[one.key])
            self._held[one.key] = steps[one.key], other or routes
        found = {key: self._held[key][1] for key in steps}
        return {key: one for key, one in found.items() if isinstance(one, InvalidRoutes)}

    def refuse(self, bad: Mapping[int, Routes]) -> None:
        """Samples that another rank can't read aren't replayed here either."""
        for key in bad.keys() & self._held.keys():
            self._held[key] = self._held[key][0], bad[key]

    def has(self, layers: Sequence[int]) -> None:
        """These are this rank's layers; what is of others goes."""
        labels = layers if isinstance(layers, tuple) else tuple(layers)  # StageLabels stay what they are
        if labels != self.layers:
            self._held.clear()
            self.layers = labels

    @property
    def nbytes(self) -> int:
        """Of the ids that are held."""
        return sum(one.ids.nbytes for _, one in self._held.values() if isinstance(one, RoutedExperts))

    def of(self, key: int) -> RoutedExperts:
        """The routes behind a key, wherever they came from.

        Raises:
            InvalidRoutes: they were refused at the door, can't be read, or their reference didn't come along.
        """
        found = self.carried.get(key) or recorded.of(key) or self._held.get(key, (0, None))[1]
        if isinstance(found, RoutedExperts):
            return found
        if found is not None:
            raise found
        if not key:
            raise InvalidRoutes(
                "these routes were refused when the rollout handed them over",
                expected="routes that pass the door",
                got="none",
                cause="the log of the agent loops' worker has the error",
            )
        raise InvalidRoutes(
            "the routes behind this sample's key aren't here",
            where=f"key {key:016x}",
            expected=f"R3: the column {COLUMN} beside routed_experts; R2: a record by this job's ranks, of "
            "this step or the one before",
            got=f"{len(recorded) + len(self._held)} other samples",
            cause="a trainer that picks single columns of its batches; workers that were started anew since. "
            f"Without {DELIVERY} batches carry the ids",
        )


arrived = Arrived()


def _other_tokens(reference: delivery.Reference, tokens: torch.Tensor) -> InvalidRoutes | None:
    """Why these routes aren't those of a sample with these token ids."""
    mark = fingerprint(tokens)
    found = find_other_tokens(reference.tokens, reference.fingerprint, len(tokens), mark)
    return None if found is None else found.error(InvalidRoutes, repr(reference))


def references_in(data: Any) -> list[Any] | None:
    """The column of references of an engine's batch; None where it has none."""
    column = listed(data.get(COLUMN, None))
    if column is None and (fields := listed(data.get(_FIELDS, None))) is not None:  # by way of TransferQueue
        column = [one.get(COLUMN) if isinstance(one, Mapping) else None for one in fields]
        column = column if any(one is not None for one in column) else None
    return column


def listed(column: Any) -> list[Any] | None:
    return None if column is None else list(column.tolist() if hasattr(column, "tolist") else column)


def rows_of(key: int | None, tokens: int) -> torch.Tensor:
    """What a batch has of a sample in the place of routes, int16 [tokens, 1, 5]; zeros without a key."""
    if key is None:
        return torch.zeros(tokens, 1, _WORDS, dtype=torch.int16)
    words = [_MARK, *np.array([key], np.uint64).view(np.int16).tolist()]
    return torch.tensor(words, dtype=torch.int16).repeat(tokens, 1, 1)


def keys_in(routes: Any) -> list[int | None]:
    """The key of each sample that a batch has in the place of routes, [batch, tokens, 1, 5], or None for
    padding; none where it has routes."""
    if routes is None or not are_keys(routes):
        return []
    each = routes.detach().to("cpu", torch.int16).unbind()
    firsts = [rows[rows[:, 0, 0] >= _REFUSED][:1, 0] for rows in each]
    return [_key(words[0]) if len(words) else None for words in firsts]


def keys_of(routes: Any, references: Sequence[delivery.Reference | None]) -> list[int | None]:
    """The same where it has marks, [batch, tokens, 1, 1], beside these references."""
    return [
        one.key if key == _STAYED and one is not None else key
        for key, one in zip(keys_in(routes), references, strict=False)
    ]


def _key(words: torch.Tensor) -> int:
    if len(words) == 1:
        return _STAYED if int(words[0]) == _MARK else 0
    return int(words[1:].numpy().view(np.uint64)[0])


def are_keys(routes: torch.Tensor) -> bool:
    """Is it keys that a batch has in the place of routes, [batch, tokens, 1, 5], or marks?

    Of samples without routes all are zeros: keys, where routes have been fetched.
    """
    if routes.dim() != 4 or tuple(routes.shape[-2:]) not in ((1, 1), (1, _WORDS)):
        return False
    flat = routes.values() if routes.is_nested else routes
    return bool((flat[..., 0, 0] >= _REFUSED).any()) or (bool(arrived.layers) and not bool(flat.any()))


def routes_of(rows: torch.Tensor, keep: torch.Tensor | None, model: RoutedModel) -> RoutedExperts:
    """The routes of one sample of a batch, of this rank's layers.

    Args:
        rows: its keys, [tokens, 1, 5].
        keep: bool [tokens], the rows to replay; all when not given.

    Raises:
        InvalidRoutes: there are none for it.
    """
    words = rows[:, 0].to("cpu", torch.int16)
    marked = words[:, 0] >= _REFUSED
    if not bool(marked.any()):  # a rollout without routes
        return RoutedExperts.unrecorded(
            len(words), layers=arrived.layers, topk=model.topk, num_experts=model.num_experts
        )
    keys = words[marked]
    InvalidRoutes.unless(
        bool((keys == keys[0]).all()),
        "the rows of a sample belong to several",
        "one key in all rows",
        "others",
        "a batch that was put together token by token",
    )
    found = arrived.of(_key(keys[0]))
    InvalidRoutes.unless(
        len(found) in (len(words), len(words) - 1),
        "the routes have another number of tokens than the sample",
        len(words),
        len(found),
        "a response that was cut after the rollout",
    )
    here = marked if keep is None else marked & keep.detach().cpu().bool()
    # Ids aren't copied: whoever lays a micro-batch out copies the rows that it has.
    return found.with_rows(found.ids, found.recorded & here[: len(found)])
