"""RouteStore: the routes of many samples in one folder: safetensors shards, and an index for each writer.

    with RouteStore.writer(folder, name=f"rank-{rank}") as writer:
        writer.add(routes)                    # by the fingerprint of its tokens
    RouteStore(folder).of(tokens)

A shard is a safetensors file with two tensors a sample, `KEY.ids` and `KEY.recorded`. NAME.index.json says of
each sample which shard holds it, and what the wire form's header says (`route_bytes.header`, and its digest).
A shard, and then the index anew, is written whole or not at all, so a job that dies leaves what was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from npu_replay import route_bytes, route_file
from npu_replay.errors import RouteFileError
from npu_replay.fingerprint import fingerprint
from npu_replay.routed_experts import RoutedExperts

FORMAT = "npu_replay.store.1"
SHARD_BYTES = 1 << 28
_INDEX = ".index.json"


class RouteStore(Mapping[str, RoutedExperts]):
    """The routes in a folder, by key. Each is read, and held against its checksum, when it is asked for.

    Raises:
        RouteFileError: the folder holds no index, or one that can't be read; or two writers have other
            routes for one key.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        route_file.require_safetensors()
        self._samples: dict[str, dict[str, Any]] = {}
        self._files: dict[Path, Any] = {}
        indexes = sorted(self.folder.glob(f"*{_INDEX}"))
        if not indexes:
            raise RouteFileError(
                "there are no routes in this folder",
                where=str(self.folder),
                expected=f"NAME{_INDEX}",
                got="none",
                cause="another folder, or a job that ended before its first shard was full: close the writer",
            )
        for index in indexes:
            self._add(index, _read_index(index))

    @staticmethod
    def writer(
        folder: str | os.PathLike[str], *, name: str = "routes", shard_bytes: int = SHARD_BYTES
    ) -> RouteWriter:
        """Begin to write into a folder, which is made if it isn't there.

        Args:
            folder: where; other writers may be at work there.
            name: one for each writer (a rank, say). What an earlier writer of this name left must be gone.
            shard_bytes: a file is written when so many bytes of ids have come together.
        """
        return RouteWriter(Path(folder), name, shard_bytes)

    def __getitem__(self, key: str) -> RoutedExperts:
        described = dict(self._samples[key])
        shard = self.folder / described.pop("shard")
        ids, recorded = self._read(shard, key)
        found = described.pop("digest", None)
        bits = recorded.numpy().tobytes()
        there = (*ids.shape, str(ids.dtype).removeprefix("torch."))
        said = (*route_bytes.shape_of(described), described["dtype"])
        if there != said or route_bytes.digest(described, ids.contiguous().numpy().data, bits) != found:
            raise RouteFileError(
                "these routes were changed after they were written",
                where=f"{shard}, {key}",
                expected=f"{said}, checksum {found}",
                got=f"{there}, another checksum",
                cause="a damaged disk, or a shard of an earlier job beside an index of a later one",
            )
        arguments = route_bytes.arguments(described, ids, recorded)
        # As written: what came from an engine was checked at the door, and a record may be constant.
        return RoutedExperts._adopt(**arguments)

    def __contains__(self, key: object) -> bool:
        return key in self._samples

    def __iter__(self) -> Iterator[str]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def of(self, tokens: Any) -> RoutedExperts:
        """The routes of one sequence of token ids, [tokens].

        Raises:
            RouteFileError: nobody wrote routes of just these tokens.
        """
        key = key_of(fingerprint(tokens))
        if key not in self:
            raise RouteFileError(
                "no routes of these tokens",
                where=str(self.folder),
                expected=f"{key} ({len(tokens)} tokens)",
                got=f"{len(self)} samples with other tokens",
                cause="another batch than the one that was recorded, or text that was tokenised again",
            )
        return self[key]

    def _add(self, index: Path, samples: dict[str, dict[str, Any]]) -> None:
        for key, described in samples.items():
            known = self._samples.setdefault(key, described)
            if known["digest"] != described["digest"]:
                raise RouteFileError(
                    "two writers have other routes for one key",
                    where=str(index),
                    expected=f"{key} once, or the same routes",
                    got=f"{known['shard']} and {described['shard']}",
                    cause="two jobs wrote into one folder",
                )

    def _read(self, shard: Path, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        from safetensors import SafetensorError, safe_open

        try:
            if shard not in self._files:
                self._files[shard] = safe_open(shard, framework="pt").__enter__()  # type: ignore[no-untyped-call]
            file = self._files[shard]
            return file.get_tensor(f"{key}.ids"), file.get_tensor(f"{key}.recorded")
        except (SafetensorError, OSError) as error:
            raise RouteFileError(
                f"the shard can't be read ({error})",
                where=f"{shard}, {key}",
                cause="a file that was cut short, changed or taken away",
            ) from error


class RouteWriter(AbstractContextManager["RouteWriter"]):
    """Writes samples into a folder, a shard at a time. See `RouteStore.writer`."""

    def __init__(self, folder: Path, name: str, shard_bytes: int) -> None:
        route_file.require_safetensors()
        if not name or Path(name).name != name:
            raise RouteFileError(
                "bad name of a writer", expected="a file name without folders", got=repr(name)
            )
        self.folder, self.name, self.shard_bytes = folder, name, shard_bytes
        self._index = folder / f"{name}{_INDEX}"
        self._samples: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, RoutedExperts] = {}
        self._shards = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RouteFileError(f"the folder can't be made ({error})", where=str(folder)) from error
        if self._index.exists() or self._shard(0).exists():
            raise RouteFileError(
                "somebody has written here under this name",
                where=str(self._index),
                cause="an earlier job, or two ranks with one name: take another folder, or another name",
            )

    def add(self, routes: RoutedExperts, key: str | None = None) -> None:
        """Write the routes of one sequence, under its fingerprint if no key is given.

        Raises:
            RouteFileError: no key and no fingerprint, or the key is taken; or the disk is full.
        """
        if key is None:
            if routes.fingerprint is None:
                raise RouteFileError(
                    "these routes have neither a key nor a fingerprint",
                    where=str(self.folder),
                    expected="add(routes, key), or a fingerprint when they were built",
                    got=routes,
                )
            key = key_of(routes.fingerprint)
        if key in self._samples or key in self._waiting:
            raise RouteFileError("the key is taken", where=str(self.folder), expected="another key", got=key)
        self._waiting[key] = routes
        if sum(one.ids.nbytes for one in self._waiting.values()) >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting, as one shard."""
        if not self._waiting:
            return
        from safetensors.torch import save

        shard, tensors = self._shard(self._shards), {}
        for key, routes in self._waiting.items():
            tensors[f"{key}.ids"] = routes.ids.contiguous()
            tensors[f"{key}.recorded"] = routes.recorded.contiguous()
        route_file.write_whole(shard, save(tensors, {"format": FORMAT}), overwrite=False)
        for key, routes in self._waiting.items():
            self._samples[key] = _described(routes) | {"shard": shard.name}
        text = json.dumps({"format": FORMAT, "samples": self._samples})
        route_file.write_whole(self._index, text.encode(), overwrite=True)
        self._waiting, self._shards = {}, self._shards + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush()

    def _shard(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:05d}.safetensors"


def key_of(mark: int) -> str:
    """The key of a sequence with this fingerprint: 16 hexadecimal digits."""
    return f"{mark:016x}"


def _described(routes: RoutedExperts) -> dict[str, Any]:
    described = route_bytes.header(routes)
    bits = routes.recorded.numpy().tobytes()
    return described | {"digest": route_bytes.digest(described, routes.ids.contiguous().numpy().data, bits)}


def _read_index(path: Path) -> dict[str, dict[str, Any]]:
    try:
        index = json.loads(path.read_text())
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}, not {FORMAT!r}")
        samples: dict[str, dict[str, Any]] = index["samples"]
        for described in samples.values():
            if Path(described["shard"]).name != described["shard"]:
                raise ValueError(f"shard {described['shard']!r}")
            route_bytes.shape_of(described)
            str(described["digest"]), str(described["dtype"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RouteFileError(
            f"this index of routes can't be read ({error!r})",
            where=str(path),
            cause="a file of something else, one that was cut short, or of another version of npu_replay",
        ) from error
    return samples
