"""Is one array of routes right? The checks say so; what can be seen of a refused one is kept too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError, RouterError
from npu_replay.inspection.suspect_rows import View
from npu_replay.rollout.admit import admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.routes.checks import CONSTANT_ROWS, MAX_EXPERTS, MAX_LAYERS, Array
from npu_replay.routes.fingerprint import find_other_tokens, fingerprint
from npu_replay.routes.routed_experts import RoutedExperts

WITHOUT_MODEL = (
    "ids against the number of experts, columns against the decoder layers, dense layers: give --config"
)
_GIVE_IDS = "rows that are another token's: give the ids (--prompt-ids, --output-ids)"
_OF_ROWS = WITHOUT_MODEL, f"rows against tokens, {_GIVE_IDS}"
_OF_ROUTES = "layers and experts against the model: give --config", f"its tokens, and {_GIVE_IDS}"
_TOPK_1 = "rows that were never captured: with a top-k of 1 they look like expert 0"
_ROOM = 1 << 30  # bytes that rows may take which aren't there
_DISTINCT = 32
FEW_ROWS = f"constant layers: a sequence has fewer than {CONSTANT_ROWS} rows"


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """What is known beside the data.

    Attributes:
        model: which layers route; None where nobody said.
        prompts, outputs: [tokens] int64 each; one for all sequences, or one each; empty where nobody said.
        start: the token of the first row.
    """

    model: RoutedModel | None = None
    prompts: tuple[Array, ...] = ()
    outputs: tuple[Array, ...] = ()
    start: int = 0

    def given(self, number: int) -> tuple[Array | None, Array | None]:
        """That sequence's prompt and output."""
        return _one_of(self.prompts, number, "--prompt-ids"), _one_of(self.outputs, number, "--output-ids")

    def tokens(self) -> Array | None:
        """Of the only sequence, prompt and output.

        Raises:
            ReplayError: one of them was given and the other wasn't.
        """
        prompt, output = self.given(0)
        if prompt is not None and output is not None:
            return np.concatenate([prompt, output])
        if prompt is None and output is None:
            return None
        raise ReplayError(
            "an array of routes needs the ids of the prompt and of the output",
            expected="--prompt-ids and --output-ids (a file with [] where there are none)",
            got=f"only {'--output-ids' if prompt is None else '--prompt-ids'}",
        )


def _one_of(lists: Sequence[Array], number: int, option: str) -> Array | None:
    if len(lists) <= 1:
        return lists[0] if lists else None
    if number >= len(lists):
        raise ReplayError(
            f"{option} has fewer lists than there are sequences",
            expected="one list of ids, or a list for each",
            got=f"{len(lists)}, none for sequence {number}",
        )
    return lists[number]


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """One sequence, and what is thought of it.

    Attributes:
        name: «completion 2», a store's key; empty where there is one only.
        problem: why it is refused, the whole message; empty where it isn't.
        tokens: of the sequence, as far as is known.
        rows, dtype, nbytes: of the ids as they came.
        layers, columns, topk: of the view: the columns that have experts, all of them, and ids in each.
        facts: what else it says of itself.
        unchecked: what couldn't be checked, and what it takes.
        view: what can be seen; None for nothing.
    """

    name: str = ""
    problem: str = ""
    tokens: int | None = None
    rows: int | None = None
    layers: int = 0
    columns: int = 0
    topk: int = 0
    dtype: str = ""
    nbytes: int = 0
    facts: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    view: View | None = None

    @classmethod
    def of(
        cls, problem: ReplayError | None, *, ids: Array | None = None, view: View | None = None, **more: Any
    ) -> Verdict:
        """With what ids and view say of themselves; `more` are its other fields."""
        if ids is not None:
            more |= {"rows": len(ids), "dtype": str(ids.dtype), "nbytes": ids.nbytes}
        if view is not None:
            columns, topk = view.ids.shape[1:]
            more |= {"layers": len(view.routed), "columns": columns, "topk": topk}
        words = "" if problem is None else str(problem).removeprefix("[npu_replay] ")
        return cls(problem=words, view=view, **more)


def judge_rows(
    rows: Array, known: Known, source: Source, *, tokens: Array | None, name: str = "", ended: bool = True
) -> Verdict:
    """Judge an engine's array, [rows, columns, topk], of any integers.

    >>> judge_rows(np.zeros((3, 2, 2), int), Known(), Source(engine="vLLM"), tokens=None).problem
    'vLLM: all 3 rows are zeros. Expected 2 different experts a token, got nothing that was captured'
    """
    problem: ReplayError | None = None
    model = known.model or guessed_model(rows)
    try:
        if model is None:
            raise source.error(
                Symptom.SHAPE,
                "this isn't an array of expert ids",
                expected="integers, [tokens, layers, topk]",
                got=f"{rows.dtype} {list(rows.shape)}",
            )
        if tokens is None and not len(rows):
            raise source.error(Symptom.MISSING, "there are no rows", expected="one a token", got=0)
        ids = stand_ins(rows, known.start + len(rows) + 1, known.start) if tokens is None else tokens
        admit(rows, model=model, tokens=ids, source=source, start=known.start, ended=ended)
    except ReplayError as error:
        problem = error
    return Verdict.of(
        problem,
        ids=rows,
        view=view_of_rows(rows, model, tokens, known.start),
        name=name,
        tokens=None if tokens is None else len(tokens),
        unchecked=_unchecked(_OF_ROWS, known, tokens, len(rows), rows.shape[2]),
    )


def stand_ins(rows: Array, count: int, start: int = 0) -> Array:
    """Ids of tokens that nobody knows, [count]. Rows that are the same get the same, so that none counts as
    another token's; different ones where nearly all are the same, which is right for no tokens."""
    ids = np.arange(count)
    seen: dict[int, int] = {}
    marks = [seen.setdefault(hash(row.tobytes()), len(seen)) for row in rows[: count - start]]
    if len(seen) >= _DISTINCT:
        ids[start : start + len(marks)] = marks
    return ids


def view_of_rows(rows: Array, model: RoutedModel | None, tokens: Array | None, start: int = 0) -> View | None:
    """What can be seen of an engine's array; rows that it should have and hasn't are without a route."""
    if not rows.size:
        return None
    known = model or guessed_model(rows)
    labels = None if known is None else known.labels(rows.shape[1])
    there = len(rows)
    lacking = 0 if tokens is None else max(0, len(tokens) - 1 - start - there)
    if lacking * rows[0].nbytes > _ROOM:
        lacking = 0
    if lacking:
        rows = np.concatenate([rows, np.zeros((lacking, *rows.shape[1:]), rows.dtype)])
    fits = tokens is not None and start + len(rows) <= len(tokens)
    return View(
        ids=rows,
        layers=labels or tuple(range(rows.shape[1])),
        num_experts=MAX_EXPERTS if known is None else known.num_experts,
        dense=frozenset(() if known is None or labels is None else known.dense),
        recorded=np.arange(len(rows)) < there if lacking else None,
        tokens=tokens[start : start + len(rows)] if tokens is not None and fits else None,
        first=start,
    )


def guessed_model(rows: Array) -> RoutedModel | None:
    """The smallest model that an array may be of: columns of zeros are taken for dense layers, the highest id
    for the last expert. None where a model has no such sizes."""
    columns, topk = rows.shape[1:]
    if not (0 < columns <= MAX_LAYERS and 0 < topk <= MAX_EXPERTS):
        return None
    routed = tuple(np.flatnonzero(rows.any(axis=(0, 2))).tolist()) or tuple(range(columns))
    highest = int(rows.max()) if rows.size else 0
    experts = max(min(highest + 1, MAX_EXPERTS), topk)
    return RoutedModel(layers=routed, num_layers=columns, num_experts=experts, topk=topk)


def _unchecked(
    words: tuple[str, str], known: Known, tokens: Array | None, rows: int, topk: int
) -> tuple[str, ...]:
    """What couldn't be checked without a model, without tokens, with a top-k of 1 or with few rows."""
    lacking = (known.model is None, tokens is None, topk == 1, rows < CONSTANT_ROWS)
    return tuple(what for what, lacks in zip((*words, _TOPK_1, FEW_ROWS), lacking, strict=True) if lacks)


def judge_routes(routes: RoutedExperts, known: Known, *, name: str = "", where: str = "") -> Verdict:
    """Judge routes that were built, so that their shape, range and duplicates are right already.

    >>> routes = npu_replay.RoutedExperts(ids=np.arange(8).reshape(2, 2, 2), layers=(0, 1), num_experts=8)
    >>> judge_routes(routes, Known(outputs=(np.array([7]),), prompts=(np.array([3, 4]),))).problem
    'these are routes of another number of tokens. Expected 3, got 2'
    """
    tokens = known.tokens()
    problem: ReplayError | None = None
    try:
        if known.model is not None:
            _check_model(routes, known.model, where)
        if tokens is not None:
            _check_tokens(routes, tokens, where)
        _check_rows(routes, tokens, where)
    except ReplayError as error:
        problem = error
    return Verdict.of(
        problem,
        ids=routes.ids.numpy(),
        view=view_of_routes(routes, tokens),
        name=name,
        tokens=len(routes),
        facts=facts_of(routes),
        unchecked=_unchecked(_OF_ROUTES, known, tokens, int(routes.recorded.sum()), routes.topk),
    )


def view_of_routes(routes: RoutedExperts, tokens: Array | None) -> View:
    """All of them can be seen."""
    return View(
        ids=routes.ids.numpy(),
        layers=routes.layers,
        num_experts=routes.num_experts,
        recorded=routes.recorded.numpy(),
        tokens=tokens if tokens is not None and len(tokens) == len(routes) else None,
    )


def facts_of(routes: RoutedExperts) -> tuple[str, ...]:
    """What routes say of themselves beside the ids."""
    facts = [f"weights {routes.weight_version}"] if routes.weight_version is not None else []
    facts += [f"fingerprint {routes.fingerprint:#018x}"] if routes.fingerprint is not None else []
    return tuple(facts)


def _check_model(routes: RoutedExperts, model: RoutedModel, where: str) -> None:
    if (routes.num_experts, routes.topk) != (model.num_experts, model.topk) or not {*routes.layers} <= {
        *model.layers
    }:
        raise RouterError(
            "these are routes of another model",
            where=where,
            expected=f"top-{model.topk} of {model.num_experts} experts in some of layers {model.layers}",
            got=f"top-{routes.topk} of {routes.num_experts} in layers {routes.layers}",
        )


def _check_tokens(routes: RoutedExperts, tokens: Array, where: str) -> None:
    if len(tokens) != len(routes):
        raise MicroBatchError(
            "these are routes of another number of tokens",
            where=where,
            expected=len(tokens),
            got=len(routes),
        )
    other = find_other_tokens(len(routes), routes.fingerprint, len(tokens), fingerprint(tokens))
    if other is not None:
        raise other.error(MicroBatchError, where)


def _check_rows(routes: RoutedExperts, tokens: Array | None, where: str) -> None:
    """Constant layers and rows of other tokens, by the check of engines' rows, which wants a token more."""
    ids, recorded = routes.ids.numpy(), routes.recorded.numpy()
    if not routes.layers or not recorded.any():
        raise InvalidRoutes(
            "there is no route in it", where=where, expected="rows with a route", got=f"none of {len(routes)}"
        )
    known = tokens
    if known is None:  # vouched for, they may all be one token's
        known = np.zeros(len(ids), np.int64) if routes.vouched else stand_ins(ids, len(ids))
    if routes.topk == 1:  # where a row of zeros is a route of expert 0
        ids, known = ids[recorded], known[recorded]
    model = RoutedModel(
        layers=routes.layers,
        num_layers=routes.layers[-1] + 1,
        num_experts=routes.num_experts,
        topk=routes.topk,
    )
    source = Source(engine="saved routes", field=where)
    admit(ids, model=model, tokens=np.append(known, 0), source=source, missing="native")
