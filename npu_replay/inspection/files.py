"""Open a file or a folder of routes, whatever it is: each sequence in it, and what is thought of it."""

from __future__ import annotations

import codecs
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
from npu_replay.rollout import payloads
from npu_replay.rollout.release_rules import Source
from npu_replay.routes.atomic_file import plain_file
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts
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
    if start.startswith(b"\x93NUMPY"):
        what = f"an .npy array{'' if engine is None else f' of {_named(engine, version)}'}"
        one = _of_array(what, partial(payloads.from_npy, data, most=len(data)), source, known)
    elif len(data) > 8 and bytes(data[8:9]) == b"{" and struct.unpack("<Q", start)[0] < len(data):
        what, one = "routes of RoutedExperts.save or to_bytes", _of_file(path, known)
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


def _judged(read: Callable[[], RoutedExperts], known: Known, where: str, name: str = "") -> Verdict:
    """What `read` returns, judged; or why it raises."""
    try:
        return judge_routes(read(), known, name=name, where=where)
    except ReplayError as error:
        return Verdict.of(error if name and name in error.where else error.at(where), name=name)


def _of_file(path: Path, known: Known) -> Verdict:
    return _judged(partial(RoutedExperts.load, path), known, str(path))


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
    return _judged(partial(store.__getitem__, key), known, f"{store.folder}, {key}", key)


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
