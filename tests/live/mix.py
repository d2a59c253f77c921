"""Requests with all features mixed at random, what comes of them, and rows made wrong on purpose."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from live.families import VOCABULARY
from live.held import CEILING, Trainer, assert_right
from npu_replay import RoutedExperts, RoutedModel, from_vllm
from npu_replay.errors import InvalidRoutes, MicroBatchError
from npu_replay.sessions.own_choice import RUN

ALL = bool(os.environ.get("NPU_REPLAY_LIVE_ALL"))
"""Were all of the sequences asked for, and not a choice?"""
Rows = np.ndarray[Any, Any]


def some_prompts(rng: np.random.Generator) -> list[list[int]]:
    """Beginnings that requests share, so that a prefix cache has work; one is longer than a chunk."""
    return [rng.integers(3, VOCABULARY, length).tolist() for length in (0, 0, 32, 70, 140)]


def ask(rng: np.random.Generator, shared: list[list[int]]) -> tuple[list[int], dict[str, Any]]:
    """A prompt, which may begin as others do, and what to sample with."""
    ids = [*shared[rng.integers(len(shared))], *rng.integers(3, VOCABULARY, rng.integers(1, 40)).tolist()]
    sampling: dict[str, Any] = {
        "max_tokens": int(rng.integers(1, 60)),
        "temperature": float(rng.choice([0, 0.7, 1])),
    }
    features: dict[str, Callable[[], Any]] = {
        "n": lambda: int(rng.choice([2, 3, 8])),
        "stop": lambda: [f"{rng.integers(10)} "],
        "stop_token_ids": lambda: rng.integers(3, VOCABULARY, 30).tolist(),
        "routed_experts_prompt_start": lambda: int(rng.integers(len(ids))),
        "ignore_eos": lambda: True,
        "logprobs": lambda: 2,
        "repetition_penalty": lambda: 1.2,
    }
    sampling |= {name: value() for name, value in features.items() if rng.random() < 0.25}
    if sampling.get("n", 1) > 1:
        sampling["temperature"] = 1.0
    return ids, sampling


@dataclass(frozen=True)
class Sequence:
    """One completion.

    Attributes:
        rows: as the engine gave them, [rows, layers, topk].
        answer: makes the engine's answer, of this completion alone, with any rows in their place.
    """

    prompt: list[int]
    sampled: list[int]
    start: int
    rows: Rows
    answer: Callable[[Rows], Any]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled


def _constant(rng: np.random.Generator, rows: Rows, layers: tuple[int, ...], _: Rows) -> Rows:
    layer = rng.choice(layers)
    rows[:, layer] = rows[0, layer]
    return rows


def _part(rng: np.random.Generator, rows: Rows, _: tuple[int, ...], other: Rows) -> Rows:
    first = rng.integers(len(rows) // 2)
    rows[first : first + len(rows) // 3] = other[first : first + len(rows) // 3]
    return rows


def _twice(rng: np.random.Generator, rows: Rows, layers: tuple[int, ...], _: Rows) -> Rows:
    row = rng.integers(len(rows))
    layer = rng.choice(layers)
    rows[row, layer, 0] = rows[row, layer, 1]
    return rows


WRONG: dict[str, Callable[[np.random.Generator, Rows, tuple[int, ...], Rows], Rows]] = {
    "shifted by one": lambda _, rows, __, ___: np.roll(rows, 1, axis=0),
    "another request's": lambda _, __, ___, other: other,
    "a third another request's": _part,
    "zeros": lambda _, rows, __, ___: np.zeros_like(rows),
    "a layer constant": _constant,
    "an expert twice": _twice,
    "one too few": lambda _, rows, __, ___: rows[:-1],
    "one too many": lambda _, rows, __, ___: np.concatenate([rows, rows[-1:]]),
}
"""Each makes wrong rows of right ones, of the MoE layers, and of another request's rows of as many tokens."""
AT_THE_DOOR = ("zeros", "an expert twice", "one too few", "one too many")
"""Those of which no trainer should ever hear."""


@dataclass
class Tally:
    """What came of all sequences of a model, so far.

    Attributes:
        refused: of wrong rows, by (kind, who refused or what showed them).
    """

    model: Any
    folder: Any
    rng: np.random.Generator
    sequences: int = 0
    token_layers: int = 0
    ties: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._before: Sequence | None = None  # of another request
        self._layers = RoutedModel.of(self.folder).layers
        self.change(self.model)

    def change(self, model: Any) -> None:
        """From now on the engine has the weights of this one."""
        self.model = model
        self._trainer = Trainer(model)

    def hold(self, completions: list[Sequence]) -> None:
        """Of one request: right rows have to be taken, and be right; wrong ones of one kind be refused."""
        for one in completions:
            routes = self._read(one, one.rows)
            self.ties += assert_right(self.model, one.tokens, routes, one.start)
            assert self._trainer.look(one.tokens, routes) <= CEILING
            self.sequences += 1
            self.token_layers += len(one.rows) * len(self._layers)
            if len(one.rows) >= 8 and self._before is not None:
                self._refuse(one, self._before)
        self._before = completions[-1]

    def _read(self, one: Sequence, rows: Rows) -> RoutedExperts:
        (routes,) = from_vllm(one.answer(rows), self.folder, start=one.start)
        return routes

    def _refuse(self, one: Sequence, other: Sequence) -> None:
        kind = list(WRONG)[self.rng.integers(len(WRONG))]
        others = np.resize(other.rows, one.rows.shape)
        rows = WRONG[kind](self.rng, one.rows.copy(), self._layers, others)
        if kind not in AT_THE_DOOR and self._differ(rows, one.rows) < 1.5 * CEILING:
            self.features["wrong ones too alike to be wrong"] += 1  # two prompts may begin alike
            return
        try:
            routes = self._read(one, rows)
        except InvalidRoutes:
            self.refused[kind, "door"] += 1
            return
        try:
            figure = self._trainer.look(one.tokens, routes)
        except MicroBatchError:
            self.refused[kind, "trainer"] += 1
            return
        apart = self._apart(rows, one.rows)
        # In one layer, or in most layers: prompts may begin alike, so fewer rows may be another token's.
        wrong = len(rows) if kind == "a layer constant" else int((apart.mean(axis=1) > 0.5).sum())
        if wrong >= RUN:  # OLMoE's last layers choose alike: 0.4 are shared by chance, 0.7 in the last
            near = self._shared(rows, one.rows)[apart.any(axis=1)].mean()
            taken = kind.endswith("another request's") and near > 0.45
            assert taken, f"{wrong} rows that are {kind} were taken, of {len(one.rows)} tokens"
            self.features["64 rows and more that share half of their experts, taken"] += 1
        assert figure > CEILING
        self.refused[kind, "figure"] += 1  # too few rows for a verdict of the trainer's own

    def _differ(self, rows: Rows, right: Rows) -> float:
        """The share of token-layers."""
        return float(self._apart(rows, right).mean())

    def _apart(self, rows: Rows, right: Rows) -> Rows:
        """Which token-layers differ: bool [rows, MoE layers]."""
        ours, theirs = (np.sort(one[:, list(self._layers)], axis=2) for one in (rows, right))
        differ: Rows = (ours != theirs).any(axis=2)
        return differ

    def _shared(self, rows: Rows, right: Rows) -> Rows:
        """The share of a row's experts that the right row has, too: [rows]."""
        ours, theirs = (one[:, list(self._layers)] for one in (rows, right))
        shared: Rows = (ours[..., None] == theirs[..., None, :]).any(axis=3).mean(axis=(1, 2))
        return shared

    def check(self, sequences: int) -> None:
        """At the end: so many at least, each kind of wrong rows seen, and hardly a tie."""
        assert self.sequences >= sequences
        # DeepSeek's experts, chosen by groups, lie close: 10 of 46,014 were seen on one processor.
        assert self.ties <= self.token_layers / 2_000
        assert not set(WRONG) - {kind for kind, _ in self.refused}
        assert not {(kind, "trainer") for kind in AT_THE_DOOR} & self.refused.keys()
