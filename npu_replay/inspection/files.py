"""Open a file or a folder of routes, whatever it is: each sequence in it, and what is thought of it."""

from __future__ import annotations

import codecs
import contextlib
import os
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from npu_replay import json_text
from npu_replay.compat.vllm.answers import said_release
from npu_replay.errors import InvalidRoutes, ReplayError, RouteFileError
from npu_replay.inspection.answers import NAMES, Engine, samples, source_of, whose
from npu_replay.inspection.judge import Known, Verdict, judge_routes, judge_rows
from npu_replay.inspection.suspect_rows import View
from npu_replay.rollout import payloads
from npu_replay.rollout.release_rules import Source
from npu_replay.routes.atomic_file import plain_file
from npu_replay.routes.checks import Array, is_ids
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.serialization import DTYPES, MAGIC, UNREADABLE, TensorFile, check_header, shape_of
from npu_replay.routes.store import FORMAT as STORE_FORMAT
from npu_replay.routes.store import RouteStore

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
) -> tuple[str, Iterable[Verdict]]:
    """What it is, in words, and the sequences in it, each judged when it is asked for.

    Raises:
        Refused: nothing can be looked into.
        ReplayError: what the caller gave doesn't fit it.
    """
    if path.is_dir():
        return _store(path, known, sample)
    data = _contents(path)
    start = bytes(data[:8])
    source = source_of(engine, version, str(path))
    if start == MAGIC:
        what, one = "bytes of RoutedExperts.to_bytes", _of_bytes(path, data, known)
    elif start.startswith(b"\x93NUMPY"):
        what = f"an .npy array{'' if engine is None else f' of {_named(engine, version)}'}"
        one = _of_array(what, partial(payloads.from_npy, data, most=len(data)), source, known)
    elif len(data) > 8 and bytes(data[8:9]) == b"{" and struct.unpack("<Q", start)[0] < len(data):
        what, one = "a file of RoutedExperts.save", _of_file(path, known)
    else:
        answer = _parsed(path, data)
        if not (isinstance(answer, list) and answer and isinstance(answer[0], list)):
            return _answer(path, answer, known, engine, version, sample)
        what = "nested lists of ids"
        read = partial(payloads.from_lists, answer, most=(len(answer), 4096, 1024))
        one = _of_array(what, read, source, known)
    if sample is not None:
        words = "there is one sequence in this file"
        raise ReplayError(words, where=str(path), expected="no --sample", got=f"--sample {sample}")
    return what, [one]


def _contents(path: Path) -> memoryview:
    """The bytes of a file, in memory of our own; its size is checked first."""
    try:
        if not path.exists():
            raise _refused(path, "there is no such file")
        with plain_file(path) as file:
            _check_size(path, os.fstat(file.fileno()).st_size, MOST_BYTES)
            data = file.read()
    except (OSError, ValueError, MemoryError) as error:
        raise _refused(path, f"the file can't be read ({error})") from error
    if not data:
        raise _refused(path, "the file is empty")
    return memoryview(data)


def _check_size(path: Path, size: int, most: int) -> None:
    if size > most:
        words = "the file is too large to look at"
        raise _refused(path, words, expected=f"at most {most:,} bytes", got=f"{size:,}")


def _refused(path: Path, problem: str, **more: Any) -> Refused:
    return Refused(RouteFileError(problem, where=str(path), **more))


# Routes that npu_replay wrote


def _judged(
    read: Callable[[], RoutedExperts],
    left: Callable[[], View | None],
    known: Known,
    where: str,
    name: str = "",
    nbytes: int = 0,
) -> Verdict:
    """What `read` returns, judged; where it raises, `left` is what can still be seen."""
    try:
        return judge_routes(read(), known, name=name, where=where)
    except ReplayError as error:
        problem = error if name and name in error.where else error.at(where)
    view = None
    with contextlib.suppress(struct.error, ArithmeticError, *UNREADABLE):
        view = left()
    return Verdict.of(problem, view=view, name=name, nbytes=nbytes)


def _of_bytes(path: Path, data: memoryview, known: Known) -> Verdict:
    read, left = partial(RoutedExperts.from_bytes, data), partial(_view_of_bytes, data)
    return _judged(read, left, known, str(path), nbytes=len(data))


def _view_of_bytes(data: memoryview) -> View | None:
    """What is left of bytes that were cut short or changed."""
    (size,) = struct.unpack_from("<I", data, 8)
    described = json_text.parse(bytes(data[12 : 12 + size]))
    check_header(described)
    tokens, layers, topk = shape_of(described)
    dtype = DTYPES[described["dtype"]]
    row = layers * topk * dtype.itemsize
    body = data[12 + size :]
    rows = min(tokens, len(body) // row)
    ids = np.frombuffer(body[: rows * row], dtype).reshape(rows, layers, topk)
    bits = np.frombuffer(body[tokens * row :], np.uint8)
    whole = rows == tokens and len(bits) == (tokens + 7) // 8
    return _raw_view(ids, described, np.unpackbits(bits, count=tokens).astype(bool) if whole else None)


def _of_file(path: Path, known: Known) -> Verdict:
    def read() -> RoutedExperts:
        with contextlib.suppress(*UNREADABLE), plain_file(path) as file:
            if TensorFile(file).metadata.get("format") == STORE_FORMAT:
                raise RouteFileError(
                    "this is one shard of a RouteStore",
                    where=str(path),
                    expected="its folder: npu-replay inspect FOLDER",
                    got="one of its files",
                )
        return RoutedExperts.load(path)

    return _judged(read, partial(_view_of_tensors, path), known, str(path))


def _view_of_tensors(path: Path, described: dict[str, Any] | None = None, prefix: str = "") -> View | None:
    """The ids in a safetensors file, whatever else is wrong with it."""
    with plain_file(path) as file:
        tensors = TensorFile(file)
        described = described or json_text.parse(tensors.metadata["routes"])
        check_header(described)
        ids, recorded = tensors.arrays(file, f"{prefix}ids", f"{prefix}recorded")
    return _raw_view(ids, described, recorded)


def _raw_view(ids: Array, described: dict[str, Any], recorded: Array | None) -> View | None:
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


def _store(path: Path, known: Known, sample: str | None) -> tuple[str, Iterable[Verdict]]:
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


def _of_store(store: RouteStore, key: str, known: Known) -> Verdict:
    def left() -> View | None:
        shard, described = store.described(key)
        return _view_of_tensors(shard, described, f"{key}.")

    return _judged(partial(store.__getitem__, key), left, known, f"{store.folder}, {key}", key)


# What an engine made


def _of_array(what: str, read: Callable[..., Array], source: Source, known: Known) -> Verdict:
    try:
        rows = read(source=source)
    except ReplayError as error:
        raise Refused(error, what) from error
    return judge_rows(rows, known, source, tokens=known.tokens())


def _named(engine: Engine, version: str) -> str:
    return f"{NAMES[engine]} {version or '(release not given)'}"


def _body(path: Path, data: memoryview) -> bytes:
    """The text of an answer, without the headers that `curl -i` writes before it."""
    _check_size(path, len(data), MOST_TEXT)
    text = bytes(data).removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
    while text.startswith(b"HTTP/"):  # 100 Continue has headers of its own
        text = text.replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")[2]
    return text


def _parsed(path: Path, data: memoryview) -> Any:
    text = _body(path, data)
    try:
        return json_text.parse(text)
    except ValueError as error:
        streamed = text[:5] == b"data:"
        raise _refused(
            path,
            "this is a stream of pieces" if streamed else "nobody knows what this file is",
            expected=KINDS,
            got=f"a file that begins with {text[:24]!r} ({str(error)[:200]})",
            cause="routes come with whole answers: ask for one with stream=false" if streamed else "",
        ) from error


def _answer(
    path: Path, answer: Any, known: Known, engine: Engine | None, version: str, sample: str | None
) -> tuple[str, list[Verdict]]:
    engine = engine or whose(answer)
    if engine is None:
        raise Refused(_unknown_answer(path, answer))
    if engine == "vllm" and not version and isinstance(answer, dict):
        version = said_release(answer)
    what = f"an answer of {_named(engine, version)}"
    try:
        found = list(samples(answer, engine, version, known))
    except ReplayError as error:
        if not isinstance(error, InvalidRoutes):
            raise  # the caller's ids
        raise Refused(error.at(path), what) from error
    chosen = [one for number, one in enumerate(found) if sample in (None, str(number), one.name)]
    if sample is not None and not chosen:
        wanted = f"0 to {len(found) - 1}"
        raise ReplayError("no such sequence in this answer", where=str(path), expected=wanted, got=sample)
    return what, chosen


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


def token_lists(path: Path | None) -> tuple[Array, ...]:
    """Token ids in a JSON file: one list, or a list of them; [tokens] int64 each.

    Raises:
        ReplayError: something else is in it.
    """
    if path is None:
        return ()
    try:
        value = json_text.parse(_body(path, _contents(path)))
        nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        lists = [np.asarray(one) for one in (value if nested else [value])]
        if any(ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") for ids in lists):
            raise ValueError("no list of integers")
        return tuple(ids.astype(np.int64) for ids in lists)
    except Refused as refused:
        raise refused.problem from None
    except (ValueError, OverflowError) as error:
        wanted = "JSON: [1, 2, 3], or a list of such"
        raise ReplayError("these aren't token ids", where=str(path), expected=wanted, got=error) from error
