"""FolderCarrier: routes on a disk that all nodes see.

A shard is a safetensors file with two tensors a piece, `0.ids` and `0.recorded`, and its header among the
metadata. References have the seals, so a shard has no digest and no index.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_replay import json_text
from npu_replay.delivery.carriers import DEFAULT_CUT, Carrier
from npu_replay.delivery.references import Read
from npu_replay.errors import ReplayError, RouteFileError
from npu_replay.routes.atomic_file import as_path, check_writer, plain_file, write_whole
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.serialization import (
    UNREADABLE,
    TensorFile,
    check_header,
    header,
    verified,
)

_SEEN = 5.0
"""Seconds within which a node sees what another has written."""
_DTYPES = {"uint8": "U8", "int16": "I16", "bool": "BOOL"}


class FolderCarrier(Carrier):
    """A folder on a disk that all nodes see: a shard for each `put_all`.

    Nobody counts readers there: `free` removes shards, of all their samples.

    Args:
        folder: made if it isn't there.
        name: of this writer, which its files begin with; one is made up if none is given.
        cut, budget: see Carrier. What isn't freed is what lies in the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str | None = None,
        cut: Any = DEFAULT_CUT,
        budget: int | None = None,
    ) -> None:
        super().__init__(cut=cut, budget=budget)
        self._folder = as_path(folder)
        self._name = f"{socket.gethostname()}-{os.getpid()}" if name is None else name
        check_writer(self._name)
        self._put: list[Path] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RouteFileError(f"nothing can be written there ({error})", where=str(folder)) from error

    def _store(self, pieces: Sequence[RoutedExperts]) -> Sequence[Any]:
        shard = self._folder / f"{self._name}-{secrets.token_hex(8)}.safetensors"
        arrays, about = {}, {}
        for number, piece in enumerate(pieces):
            arrays[f"{number}.ids"], arrays[f"{number}.recorded"] = piece.ids.numpy(), piece.recorded.numpy()
            about[str(number)] = json.dumps(header(piece))
        if pieces:
            write_whole(shard, _file_of(arrays, about), overwrite=False)
        if self._budget is not None:
            self._put.append(shard)
        return [(str(shard), number) for number in range(len(pieces))]

    def _unfreed(self) -> int:
        self._put = [shard for shard in self._put if shard.exists()]
        return sum(shard.stat().st_size for shard in self._put)

    @staticmethod
    def reader() -> Read:
        return read_folder

    @staticmethod
    def releaser() -> Any:
        return remove_shards


def _file_of(arrays: dict[str, Array], about: dict[str, str]) -> memoryview:
    """A safetensors file. The package's own way to it is by two more copies of all arrays."""
    said: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, one in arrays.items():
        place = [end, end := end + one.nbytes]
        said[name] = {"dtype": _DTYPES[one.dtype.name], "shape": one.shape, "data_offsets": place}
    text = json.dumps(said).encode()
    head = len(text).to_bytes(8, "little") + text
    file = np.empty(len(head) + end, np.uint8)
    file[: len(head)] = np.frombuffer(head, np.uint8)
    for name, one in arrays.items():
        first, end = said[name]["data_offsets"]
        file[len(head) :][first:end].view(one.dtype).reshape(one.shape)[...] = one
    return file.data


def read_folder(handles: Sequence[Any], patience: float) -> list[RoutedExperts | Exception]:
    """The pieces of shards. One that isn't there is waited for: what another node wrote may be seen late."""
    until, found = time.monotonic() + min(patience, _SEEN), list[RoutedExperts | Exception]()

    def read() -> None:
        files: dict[str, TensorFile] = {}
        for path, number in handles:
            found.append(_piece(files, path, number, until))

    # A disk that hangs can't be interrupted, only left alone.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(patience + 1)  # so that it may say what was never there
    done, late = found[:], TimeoutError(f"the disk didn't answer within {patience:.1f} s")
    return done + [late] * (len(handles) - len(done))


def _piece(files: dict[str, TensorFile], path: str, number: int, until: float) -> RoutedExperts | Exception:
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.05)
    try:
        with plain_file(Path(path)) as file:
            if path not in files:
                files[path] = TensorFile(file)
            said = json_text.parse(files[path].metadata[str(number)])
            check_header(said, optional=("digest",))
            ids, recorded = files[path].arrays(file, f"{number}.ids", f"{number}.recorded")
        known = verified(said, ids, recorded)
        return RoutedExperts.__new__(RoutedExperts)._about(**known | {"layers": tuple(known["layers"])})
    except (ReplayError, *UNREADABLE) as error:
        return error


def remove_shards(handles: Sequence[Any]) -> None:
    """Remove the shards that these lie in."""
    for path in {path for path, _ in handles}:
        Path(path).unlink(missing_ok=True)
