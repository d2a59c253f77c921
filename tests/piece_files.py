"""A carrier like RayCarrier for tests without Ray: pieces in files of a folder, which any process reads."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from npu_replay import RoutedExperts, delivery
from npu_replay.delivery.references import LAYERS_A_PIECE, checked_cut, put_away


class FileCarrier:
    """A file for each `put_all`, NAME.pieces."""

    def __init__(self, folder: Path, *, cut: Any = LAYERS_A_PIECE) -> None:
        self.folder = folder
        self.cut = checked_cut(cut)
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, routes: RoutedExperts, *, step: int = 0) -> delivery.Reference:
        return self.put_all([routes], step=step)[0]

    def put_all(self, samples: Iterable[RoutedExperts], *, step: int = 0) -> list[delivery.Reference]:
        return put_away(samples, self.cut, self._store, read_files, step)

    def _store(self, pieces: Sequence[RoutedExperts]) -> list[Any]:
        file = self.folder / f"{secrets.token_hex(8)}.pieces"
        file.write_bytes(pickle.dumps(list(pieces)))
        return [(str(file), number) for number in range(len(pieces))]


def read_files(handles: Sequence[Any], patience: float) -> list[RoutedExperts | Exception]:
    """Pieces of files; in the place of one that is gone is why."""
    return [_read(Path(file), number) for file, number in handles]


def _read(file: Path, number: int) -> RoutedExperts | Exception:
    try:
        routes: RoutedExperts = pickle.loads(file.read_bytes())[number]
    except OSError as error:
        return error
    return routes
