"""inspect: what does this file of routes hold, is it right, and if not, what is wrong with it and why."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from npu_replay.inspection.answers import Engine
from npu_replay.inspection.files import Refused, opened, token_lists
from npu_replay.inspection.judge import WITHOUT_MODEL, Known, Verdict
from npu_replay.inspection.suspect_rows import Cell, LayerFigures, Tally
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array

_TOLD = ("name", "problem", "tokens", "rows", "layers", "columns", "topk", "dtype", "nbytes", "facts")
"""What a program is told of a sequence."""


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
                "sequences": [{name: getattr(one, name) for name in _TOLD} for one in self.verdicts],
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
    "routes.bin: this file can't be read as routes (it is 411 bytes long, and its header says 410). ..."
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
        return _summed_up(path, refused.what, [Verdict.of(refused.problem)])


def _summed_up(path: Path, what: str, found: Iterable[Verdict]) -> Inspection:
    """Views are let go one by one: of several sequences only the worst of each column is kept."""
    tally = Tally()
    verdicts: list[Verdict] = []
    worst: list[dict[int, int]] = []
    strip: Strip | None = None
    for one in found:
        verdicts.append(replace(one, view=None))
        worst.append({})
        if one.view is not None:
            cells, layers = tally.add(one.view), one.view.layers
            strip = Strip(cells=cells, layers=layers, first=one.view.first, each="row")
            worst[-1] = dict(zip(layers, _worst(cells, one.problem), strict=True))
    unchecked = tuple(dict.fromkeys(words for one in verdicts for words in one.unchecked))
    return Inspection(
        path=str(path),
        what=what,
        verdicts=tuple(verdicts),
        layers=tally.figures(),
        num_experts=tally.num_experts,
        experts_known=WITHOUT_MODEL not in unchecked,
        load=tally.load,
        strip=strip if len(verdicts) == 1 else _side_by_side(worst),
        unchecked=unchecked,
    )


def _worst(cells: Array, problem: str) -> list[int]:
    """Of each column of a sequence's cells; all are refused where no cell shows why it is."""
    worst = np.where(cells == Cell.NO_ROUTE, Cell.DENSE, cells).max(axis=0, initial=0)
    worst[(cells == Cell.NO_ROUTE).all(axis=0)] = Cell.NO_ROUTE
    if problem and (worst <= Cell.NO_ROUTE).all():
        worst[:] = Cell.REFUSED
    found: list[int] = worst.tolist()
    return found


def _side_by_side(worst: list[dict[int, int]]) -> Strip | None:
    """The worst cell of each sequence by layer; one of which nothing is known is refused throughout."""
    layers = tuple(sorted({layer for one in worst for layer in one}))
    if not layers:
        return None
    cells = [[one.get(layer, Cell.DENSE if one else Cell.REFUSED) for layer in layers] for one in worst]
    return Strip(cells=np.array(cells, np.uint8), layers=layers, first=0, each="sequence")
