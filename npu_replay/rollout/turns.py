"""Rollout: collects the tokens and routes of one sample, turn by turn.

A row holds how the engine routed a token when it ran it, one step after it sampled it. So the last token of a
turn has no row, and neither have tokens that a tool inserts; the prefill of the next turn gives both theirs.
A later turn runs all tokens again, maybe with changed weights. The row that a token was sampled from is the
first one, which is therefore kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from npu_replay.errors import MicroBatchError, ReplayError, as_text, one_of
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import TokenIds, token_ids
from npu_replay.rollout.release_rules import Source
from npu_replay.routes.arguments import common
from npu_replay.routes.checks import Array, find_constant
from npu_replay.routes.fingerprint import SampleKey, find_other_tokens, fingerprint, with_key
from npu_replay.routes.routed_experts import RoutedExperts, narrow_array_dtype

Keep = Literal["first", "latest"]
Version: TypeAlias = "int | str | None"
_GIVEN = Source(engine="Rollout")


@dataclass(frozen=True, kw_only=True, eq=False)  # == of token arrays has no single answer
class Turn:
    """Describes one call of the rollout engine.

    Attributes:
        prompt: [n], all token ids that the engine was given.
        sampled: [m], those that it returned.
        routes: of both, n + m tokens or one less, as `from_vllm` and `from_sglang` return them.
        aborted: it was stopped from outside, and may have no routes.
        weight_versions: of the rows of all n + m tokens, if weights changed within the turn; else all have
            that of `routes`.
    """

    prompt: TokenIds
    sampled: TokenIds
    routes: RoutedExperts | None = None
    aborted: bool = False
    weight_versions: Sequence[Version] | None = None


@dataclass
class Rows:
    """Holds the rows of each token so far: `ids` [tokens, layers, topk], the others [tokens].

    `recorded` means that the row is known, `sampled_from` that a token was sampled from it, known or not.
    There may be unknown rows beyond the tokens, for tokens to come.
    """

    ids: Array
    recorded: Array
    sampled_from: Array
    versions: Array

    @classmethod
    def empty(cls, tokens: int, columns: tuple[int, ...], dtype: Any) -> Rows:
        """Make unknown rows; `columns` are (layers, topk)."""
        recorded, sampled_from = np.zeros((2, tokens), bool)
        return cls(np.zeros((tokens, *columns), dtype), recorded, sampled_from, np.full(tokens, None, object))

    def __len__(self) -> int:
        return len(self.recorded)

    def first(self, tokens: int) -> Rows:
        """Return a copy of the first rows. The last is sampled from anew, as what followed it is gone."""
        cut = Rows(*(array[:tokens].copy() for array in vars(self).values()))
        cut.sampled_from[-1:] = False
        return cut

    def make_room(self, tokens: int) -> None:
        """Add unknown rows until there are as many as tokens; nothing is done where there are more."""
        lacking = tokens - len(self)
        if lacking > 0:
            # Add half of the present size as well, so that a growing sample seldom copies its rows.
            more = Rows.empty(lacking + len(self) // 2, self.ids.shape[1:], self.ids.dtype)
            pairs = zip(vars(self).values(), vars(more).values(), strict=True)
            vars(self).update(zip(vars(self), map(np.concatenate, pairs), strict=True))

    def take(self, others: Rows, keep: Keep = "first") -> None:
        """Fill in rows of the same tokens, or of the first of them; by "first", known rows are kept.

        A row that `others` sampled from anew without knowing it is no longer known. The ids of `others` may
        lack unknown rows at the end.
        """
        there = len(others)
        lost = others.sampled_from & ~others.recorded & ~self.sampled_from[:there]
        for array, unknown in ((self.ids, 0), (self.recorded, False), (self.versions, None)):
            array[:there][lost] = unknown
        taken = others.recorded.copy()
        if keep == "first":
            # A row that only `others` sampled from replaces a known one: what followed it here was cut off.
            taken &= ~self.sampled_from[:there] & (~self.recorded[:there] | others.sampled_from)
        places = taken.nonzero()[0]
        if len(places):
            self.ids[places] = others.ids[places]
            self.versions[places] = others.versions[places]
        self.recorded[:there] |= taken
        self.sampled_from[:there] |= others.sampled_from


@dataclass(eq=False, repr=False)  # compared by identity: two samples may hold the same tokens
class Rollout:
    """Collects the tokens and routes of one sample over its turns.

    >>> from npu_replay import RoutedExperts, RoutedModel, Rollout, Turn
    >>> model = RoutedModel(layers=(0,), num_layers=1, num_experts=4, topk=2)
    >>> routes = RoutedExperts(ids=torch.tensor([[[3, 1]], [[2, 0]]]), layers=(0,), num_experts=4)
    >>> rollout = Rollout(model)
    >>> rollout.extend(Turn(prompt=[11, 12], sampled=[13], routes=routes))
    >>> rollout.append([14])  # a tool's answer, whose row comes with the next turn
    >>> rollout
    Rollout(1 turns, 4 tokens, 2 rows with a route)
    >>> rollout.truncate(rollout.prompt_length + 1)
    >>> rollout.tokens, rollout.routes.recorded
    (array([11, 12, 13]), tensor([ True,  True, False]))

    Args:
        model: a RoutedModel, or what `RoutedModel.from_config` takes.
        missing: "native" accepts a turn without routes that wasn't aborted, whose rows then have none;
            "error" refuses it.
        name: of the sample, for messages.
        sample_key: part of the fingerprint of its routes; tells samples of the same tokens apart.
    """

    model: Any
    missing: Literal["error", "native"] = "error"
    name: str = ""
    sample_key: SampleKey = None
    turns: int = field(default=0, init=False)
    """Calls of the engine so far."""

    def __post_init__(self) -> None:
        self.model = RoutedModel.of(self.model)
        one_of(self.missing, ("error", "native"), "way with missing routes", self._where)
        self._tokens: Array = np.empty(0, np.int64)
        columns = len(self.model.layers), self.model.topk
        self._rows = Rows.empty(0, columns, narrow_array_dtype(self.model.num_experts))
        self._first_sampled: int | None = None

    @property
    def _where(self) -> str:
        return f"Rollout {as_text(self.name)}".rstrip()

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        rows = int(self._rows.recorded.sum())
        return f"Rollout({name}{self.turns} turns, {len(self)} tokens, {rows} rows with a route)"

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens before the first sampled one; of all tokens if none was sampled."""
        return len(self) if self._first_sampled is None else self._first_sampled

    @property
    def tokens(self) -> Array:
        """Return all token ids so far, [tokens] int64."""
        return self._tokens.copy()

    @property
    def routes(self) -> RoutedExperts:
        """Return one row per token so far, with the fingerprint and the common weight version."""
        rows = self._rows.first(len(self))
        model = self.model
        ids = rows.ids
        recorded = rows.recorded
        constant = find_constant(ids, recorded, model.num_experts, self._tokens, model.layers)
        return RoutedExperts.of_checked(
            ids=torch.from_numpy(ids),
            layers=model.layers,
            num_experts=model.num_experts,
            recorded=torch.from_numpy(recorded),
            fingerprint=fingerprint(self._tokens, sample_key=self.sample_key),
            weight_version=common(rows.versions[recorded]),
            constant_layers_ok=constant is None,
            from_engine=True,
        )

    @property
    def weight_versions(self) -> list[Version]:
        """Return the weights that made each token's row; None for no route, or if unknown."""
        versions: list[Version] = self._rows.versions[: len(self)].tolist()
        return versions

    def append(self, tokens: TokenIds) -> None:
        """Add tokens that weren't sampled (a tool's answer). Their rows come with the next turn."""
        self._add(token_ids(tokens, _GIVEN))

    def extend(self, turn: Turn, keep: Keep = "first") -> None:
        """Add a turn.

        Args:
            turn: its prompt and sampled tokens begin with the tokens so far. That holds after an abort too:
                the engine is given, and runs, everything again.
            keep: "first" keeps the rows that tokens were sampled from, of the weights of that time; "latest"
                takes all rows of this turn.

        >>> model = npu_replay.RoutedModel(layers=(3, 7), num_layers=8, num_experts=4, topk=2)
        >>> rollout = npu_replay.Rollout(model)
        >>> rollout.extend(npu_replay.Turn(prompt=[11, 12], sampled=[13], routes=routes.take([0, 1])))
        >>> rollout.extend(npu_replay.Turn(prompt=[11, 12, 13, 21], sampled=[], aborted=True))
        >>> rollout
        Rollout(2 turns, 4 tokens, 2 rows with a route)

        Raises:
            ReplayError: other tokens than those so far, routes of another sequence or model, or no routes.
        """
        one_of(keep, get_args(Keep), "way to keep rows", "Rollout")
        prompt = token_ids(turn.prompt, _GIVEN)
        sampled = token_ids(turn.sampled, _GIVEN)
        whole = np.concatenate([prompt, sampled])
        self._check_goes_on(whole)
        rows = self._rows_of(turn, whole)
        # The first sampled token came from the row of the last one before it, prompt or earlier turn.
        sampled_from = max(len(prompt), len(self)) - 1
        if len(whole) - 1 > sampled_from:
            rows.sampled_from[max(0, sampled_from) : len(whole) - 1] = True
        # A first turn may be one of several that are merged.
        if self.turns and self.missing == "error" and turn.routes is not None and not turn.aborted:
            self._refuse_gaps(rows, min(len(turn.routes), len(whole) - 1))
        self._add(whole[len(self) :])
        self._rows.take(rows, keep)
        if self._first_sampled is None and len(sampled):
            self._first_sampled = len(prompt)
        self.turns += 1

    @classmethod
    def merge(cls, samples: Sequence[Rollout], keep: Keep = "first") -> Rollout:
        """Merge samples, each of which continues the one before (a turn each, say), into one.

        Raises:
            ReplayError: one doesn't begin with the tokens of the one before, or they are of different models.
        """
        one_of(keep, get_args(Keep), "way to keep rows", "Rollout")
        models = [sample.model for sample in samples]
        if not models or any(model != models[0] for model in models):
            raise ReplayError(
                "these samples can't be merged",
                where="Rollout",
                expected="one Rollout at least, all of one model",
                got=models,
            )
        merged = cls(samples[0].model, samples[0].missing, samples[0].name, samples[0].sample_key)
        for sample in samples:
            merged._check_goes_on(sample._tokens)
            merged._add(sample._tokens[len(merged) :])
            merged._rows.take(sample._rows.first(len(sample)), keep)
            merged.turns += sample.turns
            if merged._first_sampled is None:
                merged._first_sampled = sample._first_sampled
        return merged

    def truncate(self, length: int) -> None:
        """Drop all tokens from `length` on, and their rows; a longer length changes nothing.

        The last remaining row is sampled from anew if a turn continues from here.
        """
        ReplayError.unless(length >= 0, "bad length to truncate to", "0 or more", length, where=self._where)
        if length < len(self):
            self._rows = self._rows.first(length)
            self._tokens = self._tokens[:length]
        if length <= self.prompt_length:  # no sampled token is left
            self._first_sampled = None

    def _add(self, tokens: Array) -> None:
        self._tokens = np.concatenate([self._tokens, tokens])
        self._rows.make_room(len(self))

    def _check_goes_on(self, whole: Array) -> None:
        length = min(len(whole), len(self))
        differ = np.flatnonzero(whole[:length] != self._tokens[:length])
        if len(differ) == 0 and len(whole) >= len(self):
            return
        at = int(differ[0]) if len(differ) else length
        near = slice(max(0, at - 2), at + 3)
        ours, theirs = (f"... {ids[near].tolist()} ({len(ids)} tokens)" for ids in (self._tokens, whole))
        raise ReplayError(
            f"turn {self.turns + 1} doesn't go on from the tokens so far: they part at token {at}",
            where=self._where,
            expected=ours,
            got=theirs,
            cause="text that was decoded and tokenised again (pass token ids on), a chat template that "
            "rewrites earlier turns (it drops their reasoning, say), or a turn of another sample",
        )

    def _refuse_gaps(self, rows: Rows, ran: int) -> None:
        """Refuse a turn whose first row comes after one that isn't known; `ran` tokens of it were run."""
        sent = np.flatnonzero(rows.recorded)
        known = rows.recorded[: int(sent[0]) if len(sent) else ran].copy()
        there = slice(0, min(len(known), len(self)))
        # A row that a token was sampled from keeps what it has, be it nothing, as after an abort.
        sampled = self._rows.sampled_from[there]
        known[there] |= sampled | (self._rows.recorded[there] & ~rows.sampled_from[there])
        gaps = np.flatnonzero(~known)
        if len(gaps) == 0:
            return
        raise ReplayError(
            f"this turn leaves out {len(gaps)} rows that no turn before it has brought",
            where=f"{self._where}, turn {self.turns + 1}",
            expected=f"the rows from token {gaps[0]} on",
            got=f"those from token {sent[0]} on" if len(sent) else "none",
            cause="a request with routed_experts_start_len (SGLang) or routed_experts_prompt_start (vLLM) "
            "beyond them: the last token of a turn and a tool's tokens get their rows from the next turn. "
            'missing="native" leaves such rows to the router',
        )

    def _rows_of(self, turn: Turn, whole: Array) -> Rows:
        """Return the rows of a turn, one per token, if they are this sample's."""
        routes = turn.routes
        tokens = len(whole)
        rows = Rows.empty(tokens, (0, 0), np.uint8)
        check = MicroBatchError.unless
        where = f"{self._where}, turn {self.turns + 1}"
        if routes is None:
            if not turn.aborted and self.missing != "native":
                raise ReplayError(
                    "this turn has no routes",
                    where=where,
                    expected="routes of each turn that wasn't aborted",
                    got=None,
                    cause='an engine that captures no routes; missing="native" leaves such rows to the '
                    "router",
                )
            return rows
        wanted = (self.model.layers, self.model.topk, self.model.num_experts)
        sizes = (routes.layers, routes.topk, routes.num_experts)
        check(
            sizes == wanted,
            "these are routes of another model",
            f"(layers, top-k, experts) {wanted}",
            sizes,
            where=where,
        )
        mark = fingerprint(whole)
        if routes.fingerprint != mark:  # an engine's routes have no key
            mark = with_key(mark, self.sample_key)
        other = find_other_tokens(len(routes), routes.fingerprint, tokens, mark)
        if other is not None:
            raise other.error(MicroBatchError, where)
        # Routes may lack the last token, whose row then stays unknown until the next turn.
        rows.ids = routes.ids.numpy()
        rows.recorded[: len(routes)] = routes.recorded.numpy()
        versions = np.full(tokens, routes.weight_version, object)
        if turn.weight_versions is not None:
            weight_versions = list(turn.weight_versions)
            check(
                len(weight_versions) == tokens,
                "another number of weight versions than tokens",
                f"{tokens}, one a token of prompt and sampled tokens",
                len(weight_versions),
                where=where,
            )
            versions[:] = weight_versions
        rows.versions[rows.recorded] = versions[rows.recorded]
        return rows
