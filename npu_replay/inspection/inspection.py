"""inspect: what does this file of routes hold, is it right, and if not, what is wrong with it and why."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from npu_replay.inspection.answers import Engine
from npu_replay.inspection.files import Refused, opened, token_lists
from npu_replay.inspection.judge import WITHOUT_MODEL, Known, Sample
from npu_replay.inspection.route_view import Cell, LayerFigures, Tally
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is thought of one sequence. `problem` is the whole message, and empty where it is all right."""

    name: str
    problem: str
    tokens: int | None
    rows: int | None
    layers: int
    columns: int
    topk: int
    dtype: str
    nbytes: int
    facts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Strip:
    """The cells of one sequence, [rows, layers], or the worst of each sequence's, [sequences, layers].

    Attributes:
        cells: uint8, values of `Cell`.
        layers: the decoder layer of each column.
        first: what the first row is the number of.
        each: «row» or «sequence».
    """

    cells: Array
    layers: tuple[int, ...]
    first: int
    each: Literal["row", "sequence"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inspection:
    """All that was found.

    Attributes:
        path: of the file or folder.
        what: it is, in words.
        verdicts: one a sequence.
        layers: figures of each, over all sequences that can be seen.
        num_experts: of a layer; where `experts_known` isn't set, the highest id and one.
        load: by layer, how many rows named each expert, [num_experts].
        strip: the picture of the rows; None where nothing can be seen.
        unchecked: what couldn't be checked, and what it takes.
    """

    path: str
    what: str
    verdicts: tuple[Verdict, ...]
    layers: tuple[LayerFigures, ...]
    num_experts: int
    experts_known: bool
    load: dict[int, Array]
    strip: Strip | None
    unchecked: tuple[str, ...]

    @property
    def bad(self) -> tuple[Verdict, ...]:
        """The sequences that are refused."""
        return tuple(verdict for verdict in self.verdicts if verdict.problem)

    @property
    def good(self) -> bool:
        return bool(self.verdicts) and not self.bad

    def to_json(self) -> str:
        """All of it but the pictures, for programs."""
        return json.dumps(
            {
                "ok": self.good,
                "path": self.path,
                "what": self.what,
                "num_experts": self.num_experts if self.experts_known else None,
                "sequences": [asdict(verdict) for verdict in self.verdicts],
                "layers": [asdict(layer) for layer in self.layers],
                "unchecked": list(self.unchecked),
            },
            indent=2,
        )


def inspect(
    path: Path,
    *,
    config: Path | None = None,
    engine: Engine | None = None,
    version: str = "",
    prompt_ids: Path | None = None,
    output_ids: Path | None = None,
    start: int = 0,
    sample: str | None = None,
) -> Inspection:
    """Look at a file or a folder, and hold all that is in it against the checks of an engine's routes.

    Args:
        path: see `files.KINDS`.
        config: the model's config.json, or its folder.
        engine: whose array or answer it is; None finds out, for an answer.
        version: the engine's release, for the causes of errors.
        prompt_ids, output_ids: JSON of token ids, one list, or a list a sequence.
        start: the token of the first row (`routed_experts_prompt_start`, `routed_experts_start_len`).
        sample: a store's key, or the number of an answer's completion: only that one.

    Raises:
        ReplayError: the config or the ids can't be read, or there is no such sample. What is wrong with the
            data itself is in the Inspection.

    >>> routes = npu_replay.RoutedExperts(ids=np.arange(8).reshape(2, 2, 2), layers=(0, 1), num_experts=8)
    >>> _ = Path("routes.bin").write_bytes(routes.to_bytes() + b"!")
    >>> inspect(Path("routes.bin")).bad[0].problem
    'routes.bin: these routes are incomplete. Expected 9 bytes after the header, got 10. ...'
    """
    known = Known(
        model=None if config is None else RoutedModel.from_config(config),
        prompts=token_lists(prompt_ids),
        outputs=token_lists(output_ids),
        start=start,
    )
    try:
        what, found = opened(path, known, engine, version, sample)
        return _summed_up(path, what, found)
    except Refused as refused:
        return _summed_up(path, refused.what, [Sample(problem=refused.problem)])


# What is said of it all


def _summed_up(path: Path, what: str, found: Iterable[Sample]) -> Inspection:
    tally, seen = Tally(), _Seen()
    verdicts: list[Verdict] = []
    unchecked: dict[str, None] = {}
    experts = 0
    for one in found:
        verdicts.append(_verdict(one))
        seen.add(one, None if one.view is None else tally.add(one.view))
        unchecked |= dict.fromkeys(one.unchecked)
        experts = max(experts, 0 if one.view is None else one.view.num_experts)
    return Inspection(
        path=str(path),
        what=what,
        verdicts=tuple(verdicts),
        layers=tally.figures(),
        num_experts=experts,
        experts_known=WITHOUT_MODEL not in unchecked,
        load=tally.load,
        strip=seen.strip(),
        unchecked=tuple(unchecked),
    )


def _verdict(one: Sample) -> Verdict:
    ids = None if one.view is None else one.view.ids
    return Verdict(
        name=one.name,
        problem="" if one.problem is None else str(one.problem).removeprefix("[npu_replay] "),
        tokens=one.tokens,
        rows=one.rows,
        layers=0 if ids is None or one.view is None else len(one.view.routed),
        columns=0 if ids is None else ids.shape[1],
        topk=0 if ids is None else ids.shape[2],
        dtype=one.dtype,
        nbytes=one.nbytes,
        facts=one.facts,
    )


class _Seen:
    """The cells of one sequence whole, those of several summed up, so that thousands need no room."""

    def __init__(self) -> None:
        self._only: Strip | None = None
        self._worst: list[dict[int, int]] = []
        self._layers: set[int] = set()

    def add(self, one: Sample, cells: Array | None) -> None:
        view = one.view
        self._only = None
        if view is None or cells is None:
            self._worst.append({})
            return
        if not self._worst:
            self._only = Strip(cells=cells, layers=view.layers, first=view.first, each="row")
        worst = np.where(cells == Cell.NO_ROUTE, Cell.DENSE, cells).max(axis=0, initial=0)
        worst[(cells == Cell.NO_ROUTE).all(axis=0)] = Cell.NO_ROUTE
        if one.problem is not None and (worst <= Cell.NO_ROUTE).all():
            worst[:] = Cell.REFUSED  # for what no cell shows
        self._worst.append(dict(zip(view.layers, worst.tolist(), strict=True)))
        self._layers |= {*view.layers}

    def strip(self) -> Strip | None:
        if len(self._worst) == 1 or not self._layers:
            return self._only
        layers = tuple(sorted(self._layers))
        cells = [
            [worst.get(layer, Cell.DENSE if worst else Cell.REFUSED) for layer in layers]
            for worst in self._worst
        ]
        return Strip(cells=np.array(cells, np.uint8), layers=layers, first=0, each="sequence")
