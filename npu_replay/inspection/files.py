"""Open a file or a folder of routes, whatever it is: each sequence in it, judged."""

from __future__ import annotations

import codecs
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_replay import json_text
from npu_replay.errors import InvalidRoutes, ReplayError, RouteFileError
from npu_replay.inspection import captured
from npu_replay.inspection.captured import Engine
from npu_replay.inspection.judge import Known, Sample, judge_routes, judge_rows
from npu_replay.inspection.route_view import View
from npu_replay.rollout import payloads
from npu_replay.routes import wire as route_bytes
from npu_replay.routes.checks import Array, is_ids
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.store import FORMAT as STORE_FORMAT
from npu_replay.routes.store import RouteStore
from npu_replay.routes.tensor_file import UNREADABLE, TensorFile, plain_file

KINDS = (
    "routes that RoutedExperts.save or to_bytes made, a folder of RouteStore, an .npy array, or a whole "
    "answer of vLLM or SGLang as JSON"
)
MOST_TEXT = 2 << 30
"""Bytes of JSON that are read; parsed, they take several times as much memory."""
MOST_BYTES = 16 << 30
"""Bytes of a file of ids."""


class Refused(Exception):
    """The data as a whole can't be looked into."""

    def __init__(self, problem: ReplayError, what: str = "") -> None:
        super().__init__(problem)
        self.problem, self.what = problem, what


def opened(
    path: Path, known: Known, engine: Engine | None, version: str, sample: str | None
) -> tuple[str, Iterable[Sample]]:
    """What it is, in words, and the sequences in it, each judged when it is asked for."""
    if path.is_dir():
        return _store(path, known, sample)
    data = _contents(path)
    start = bytes(data[:8])
    if start == route_bytes.MAGIC:
        what, found = "bytes of RoutedExperts.to_bytes", [_of_bytes(path, data, known)]
    elif start.startswith(b"\x93NUMPY"):
        what, found = _npy(path, data, known, engine, version)
    elif len(data) > 8 and bytes(data[8:9]) == b"{" and struct.unpack("<Q", start)[0] < len(data):
        what, found = "a file of RoutedExperts.save", [_of_file(path, known)]
    else:
        return _answer(path, data, known, engine, version, sample)
    if sample is not None:
        raise ReplayError("there is one sequence in this file", where=str(path), got=f"--sample {sample}")
    return what, found


def _contents(path: Path, most: int = MOST_BYTES) -> memoryview:
    """The bytes of a file, in memory of our own; its size is checked first."""
    try:
        if not path.exists():
            raise Refused(RouteFileError("there is no such file", where=str(path)))
        with plain_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise Refused(_too_large(path, size, most))
            data = file.read()
    except (OSError, ValueError, MemoryError) as error:
        raise Refused(RouteFileError(f"the file can't be read ({error})", where=str(path))) from error
    if not data:
        raise Refused(RouteFileError("the file is empty", where=str(path)))
    return memoryview(data)


def _too_large(path: Path, size: int, most: int) -> RouteFileError:
    return RouteFileError(
        "the file is too large to look at",
        where=str(path),
        expected=f"at most {most:,} bytes",
        got=f"{size:,}",
    )


# Routes that npu_replay wrote


def _of_bytes(path: Path, data: memoryview, known: Known) -> Sample:
    try:
        return judge_routes(RoutedExperts.from_bytes(data), known, where=str(path))
    except ReplayError as error:
        return Sample(problem=error.at(path), view=_view_of_bytes(data), nbytes=len(data))


def _view_of_bytes(data: memoryview) -> View | None:
    """What is left of bytes that were cut short or changed."""
    try:
        (size,) = struct.unpack_from("<I", data, 8)
        described = json_text.parse(bytes(data[12 : 12 + size]))
        tokens, layers, topk = route_bytes.shape_of(described)
        dtype = route_bytes.DTYPES[described["dtype"]]
        row = layers * topk * dtype.itemsize
        body = data[12 + size :]
        rows = min(tokens, len(body) // row)
        ids = np.frombuffer(body[: rows * row], dtype).reshape(rows, layers, topk)
        bits = np.frombuffer(body[tokens * row :], np.uint8)
        whole = rows == tokens and len(bits) == (tokens + 7) // 8
        return _raw_view(ids, described, np.unpackbits(bits, count=tokens).astype(bool) if whole else None)
    except (struct.error, ValueError, KeyError, TypeError, ArithmeticError):
        return None


def _of_file(path: Path, known: Known) -> Sample:
    try:
        return judge_routes(RoutedExperts.load(path), known, where=str(path))
    except ReplayError as error:
        if _format_of(path) == STORE_FORMAT:
            problem = RouteFileError(
                "this is one shard of a RouteStore",
                where=str(path),
                expected="its folder: npu-replay inspect FOLDER",
                got="one of its files",
            )
            return Sample(problem=problem)
        return Sample(problem=error, view=_view_of_tensors(path))


def _format_of(path: Path) -> str | None:
    try:
        return TensorFile(path).metadata.get("format")
    except UNREADABLE:
        return None


def _view_of_tensors(path: Path, prefix: str = "", described: dict[str, Any] | None = None) -> View | None:
    """The ids in a safetensors file, whatever else is wrong with it."""
    try:
        file = TensorFile(path)
        about = json_text.parse(file.metadata["routes"]) if described is None else described
        route_bytes.shape_of(about)
        ids, recorded = file.arrays(f"{prefix}ids", f"{prefix}recorded")
        return _raw_view(ids, about, recorded)
    except UNREADABLE:
        return None


def _raw_view(ids: Array, described: dict[str, Any], recorded: Array | None = None) -> View | None:
    labels, experts = described["layers"], described["num_experts"]
    if not is_ids(ids) or not ids.size:
        return None
    good = recorded is not None and recorded.shape == ids.shape[:1] and recorded.dtype == bool
    return View(
        ids=ids,
        layers=tuple(labels) if len(labels) == ids.shape[1] else tuple(range(ids.shape[1])),
        num_experts=experts,
        recorded=recorded if good else None,
    )


def _store(path: Path, known: Known, sample: str | None) -> tuple[str, Iterable[Sample]]:
    try:
        store = RouteStore(path)
    except RouteFileError as error:
        raise Refused(error) from error
    if sample is not None and sample not in {*store}:
        raise ReplayError(
            "no such sample in this folder",
            where=str(path),
            expected=f"one of {len(store)} keys, such as {next(iter(store), 'none')}",
            got=sample,
        )
    if sample is None and (known.prompts or known.outputs):
        raise ReplayError(
            "these ids are one sample's",
            where=str(path),
            expected="--sample KEY with them",
            got="no --sample",
        )
    keys = list(store) if sample is None else [sample]
    return f"a folder of RouteStore, {len(store):,} samples", (_of_store(store, key, known) for key in keys)


def _of_store(store: RouteStore, key: str, known: Known) -> Sample:
    where = f"{store.folder}, {key}"
    try:
        return judge_routes(store[key], known, name=key, where=where)
    except ReplayError as error:
        shard, described = store.described(key)
        view = _view_of_tensors(shard, f"{key}.", described)
        problem = error if key in error.where else error.at(where)
        return Sample(name=key, problem=problem, view=view)


# What an engine made


def _npy(
    path: Path, data: memoryview, known: Known, engine: Engine | None, version: str
) -> tuple[str, list[Sample]]:
    what = f"an .npy array{'' if engine is None else f' of {_named(engine, version)}'}"
    source = captured.source_of(engine, version, str(path))
    try:
        rows = payloads.from_npy(data, source=source, most=len(data))
    except ReplayError as error:
        raise Refused(error, what) from error
    return what, [judge_rows(rows, known, source, tokens=known.tokens())]


def _named(engine: Engine, version: str) -> str:
    return f"{captured.NAMES[engine]} {version or '(release not given)'}"


def _answer(
    path: Path, data: memoryview, known: Known, engine: Engine | None, version: str, sample: str | None
) -> tuple[str, Iterable[Sample]]:
    text = _body(path, data)
    try:
        answer = json_text.parse(text)
    except ValueError as error:
        streamed = text[:5] == b"data:"
        raise Refused(
            RouteFileError(
                "nobody knows what this file is" if not streamed else "this is a stream of pieces",
                where=str(path),
                expected=KINDS,
                got=f"a file that begins with {text[:24]!r} ({str(error)[:200]})",
                cause="routes come with whole answers: ask for one with stream=false" if streamed else "",
            )
        ) from error
    source = captured.source_of(engine, version, str(path))
    if isinstance(answer, list) and answer and isinstance(answer[0], list):
        most = (len(answer), 4096, 1024)
        try:
            rows = payloads.from_lists(answer, source=source, most=most)
        except ReplayError as error:
            raise Refused(error, "nested lists") from error
        return "nested lists of ids", [judge_rows(rows, known, source, tokens=known.tokens())]
    engine = engine or captured.whose(answer)
    if engine is None:
        raise Refused(_unknown_answer(path, answer))
    what = f"an answer of {_named(engine, version)}"
    try:
        found = list(captured.samples(answer, engine, version, known))
    except ReplayError as error:
        if not isinstance(error, InvalidRoutes):
            raise  # the caller's ids
        raise Refused(error.at(path), what) from error
    return what, found if sample is None else [_numbered(found, sample, path)]


def _body(path: Path, data: memoryview) -> bytes:
    """The text of an answer, without the headers that `curl -i` writes before it."""
    if len(data) > MOST_TEXT:
        raise Refused(_too_large(path, len(data), MOST_TEXT))
    text = bytes(data).removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
    while text.startswith(b"HTTP/"):  # 100 Continue has headers of its own
        text = text.replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")[2]
    return text


def _unknown_answer(path: Path, answer: Any) -> ReplayError:
    complaints = ("error", "message", "detail") if isinstance(answer, dict) else ()
    said = next((answer[key] for key in complaints if answer.get(key)), None)
    if said is not None:
        return RouteFileError(
            "the server answered with an error", where=str(path), expected="routes", got=said
        )
    keys = sorted(map(str, answer))[:8] if isinstance(answer, dict) else type(answer).__name__
    return RouteFileError(
        "there are no routes in this JSON, and whose answer it is can't be told",
        where=str(path),
        expected="routed_experts or prompt_routed_experts (vLLM), meta_info or sglext (SGLang)",
        got=keys,
        cause="an engine or a request that wasn't asked for routes, or a file of something else; --engine "
        "vllm or sglang names the engine",
    )


def _numbered(found: Sequence[Sample], wanted: str, path: Path) -> Sample:
    for number, one in enumerate(found):
        if wanted in (str(number), one.name):
            return one
    raise ReplayError(
        "no such sequence in this answer", where=str(path), expected=f"0 to {len(found) - 1}", got=wanted
    )


def token_lists(path: Path | None) -> tuple[Array, ...]:
    """Token ids in a JSON file: one list, or a list of them."""
    if path is None:
        return ()
    try:
        value = json_text.parse(_body(path, _contents(path)))
        nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        lists = [np.asarray(one) for one in (value if nested else [value])]
        if not isinstance(value, list) or any(
            ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") for ids in lists
        ):
            raise ValueError("no list of integers")
        return tuple(ids.astype(np.int64) for ids in lists)
    except Refused as refused:
        raise refused.problem from None
    except (ValueError, OverflowError) as error:
        raise ReplayError(
            "these aren't token ids",
            where=str(path),
            expected="JSON: [1, 2, 3], or a list of such",
            got=error,
        ) from error
