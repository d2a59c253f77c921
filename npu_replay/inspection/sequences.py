"""Open a file or a folder of routes, and decode each sequence in it, or say why it is refused."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from npu_replay import json_text
from npu_replay.compat.sglang import decode as sglang
from npu_replay.compat.vllm import decode as vllm
from npu_replay.errors import MicroBatchError, ReplayError, RouteFileError, RouterError
from npu_replay.options import message
from npu_replay.rollout import payloads, server_answers
from npu_replay.rollout.admit import admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import Source
from npu_replay.routes.atomic_file import plain_file
from npu_replay.routes.checks import Array
from npu_replay.routes.fingerprint import find_other_tokens, fingerprint
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.store import RouteStore

Engine = Literal["vllm", "sglang"]
NAMES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
KINDS = (
    "routes that RoutedExperts.save or to_bytes made, a folder of RouteStore, an .npy array, or a whole "
    "answer of vLLM or SGLang as JSON"
)
MOST_TEXT = 2 << 30
"""Bytes of JSON that are read; parsed, they take several times as much memory."""
MOST_BYTES = 16 << 30
"""Bytes of an .npy array that are read."""
_MOST_TOKENS = 1 << 23  # of a sequence whose tokens are only counted
_NO_MODEL = "layers and experts against the model: give --config"
_NO_TOKENS = "rows and layers that are alike for other tokens: give the ids (--prompt-ids, --output-ids)"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the caller says beside the data.

    Attributes:
        model: which layers route; None where nobody said.
        engine: whose array or answer it is; None finds out, for an answer.
        version: the engine's release, for the causes of errors.
        prompts, outputs: [tokens] int64 each; one for all sequences, or one each; empty where nobody said.
        start: the token of the first row.
        sample: the only sequence to look at, by its key or number.
    """

    model: RoutedModel | None = None
    engine: Engine | None = None
    version: str = ""
    prompts: tuple[Array, ...] = ()
    outputs: tuple[Array, ...] = ()
    start: int = 0
    sample: str | None = None

    def ids(self, number: int) -> tuple[Array | None, Array | None]:
        """Return the prompt and the output of one sequence."""
        return _one_of(self.prompts, number, "--prompt-ids"), _one_of(self.outputs, number, "--output-ids")

    def tokens(self) -> Array | None:
        """Return the prompt and the output of the only sequence together.

        Raises:
            ReplayError: one of them was given and the other wasn't.
        """
        prompt, output = self.ids(0)
        if prompt is not None and output is not None:
            return np.concatenate([prompt, output])
        if prompt is None and output is None:
            return None
        raise ReplayError(
            "an array of routes needs the ids of the prompt and of the output",
            expected="--prompt-ids and --output-ids (a file with [] where there are none)",
            got=f"only {'--output-ids' if prompt is None else '--prompt-ids'}",
        )

    def needed_model(self, what: str) -> RoutedModel:
        """Return the model, without which an engine's rows can't be decoded."""
        if self.model is None:
            raise ReplayError(
                "an engine's rows don't say which layers and experts they are of",
                where=what,
                expected="--config, the model's config.json or its folder",
                got="no --config",
            )
        return self.model


def _one_of(lists: tuple[Array, ...], number: int, option: str) -> Array | None:
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
class Sequence:
    """One sequence that was decoded or refused.

    Attributes:
        name: «completion 2», a store's key; empty where there is one only.
        routes: None where it is refused.
        problem: why it is refused, the whole message; empty where it isn't.
        named: are its token ids known, so that its fingerprint means something?
        unchecked: what couldn't be checked, and what it takes.
    """

    name: str = ""
    routes: RoutedExperts | None = None
    problem: str = ""
    named: bool = True
    unchecked: tuple[str, ...] = ()


def opened(path: Path, given: Given) -> tuple[str, Iterator[Sequence]]:
    """Return what a path holds, in words, and its sequences; those of a folder are decoded one by one.

    Raises:
        ReplayError: nothing in it can be looked into, or what the caller gave doesn't fit it.
    """
    if path.is_dir():
        return _of_folder(path, given)
    start = _contents(path, 9)
    if start.startswith(b"\x93NUMPY"):
        whole = _contents(path)
        return _of_array("an .npy array", path, partial(payloads.from_npy, whole, most=len(whole)), given)
    if start[7:9] == b"\0{":  # eight bytes of a length, then JSON; in a text no byte is 0
        _refuse_sample(path, given)
        saved = _of_saved(lambda: RoutedExperts.load(path), given, str(path))
        return "a file of RoutedExperts.save or to_bytes", iter([saved])
    answer = _parsed(path, _contents(path))
    if isinstance(answer, list) and answer and isinstance(answer[0], list):
        most = (len(answer), 4096, 1024)
        return _of_array("nested lists of ids", path, partial(payloads.from_lists, answer, most=most), given)
    return _of_answer(path, answer, given)


def _contents(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a plain file, or its first ones; its size is checked before it is read."""
    try:
        if not path.exists():
            raise RouteFileError("there is no such file", where=str(path))
        with plain_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if most is None and size > MOST_BYTES:
                raise _too_large(path, size, MOST_BYTES)
            data: bytes = file.read() if most is None else file.read(most)
    except (OSError, ValueError, MemoryError) as error:
        raise RouteFileError(f"the file can't be read ({error})", where=str(path)) from error
    if not data:
        raise RouteFileError("the file is empty", where=str(path))
    return data


def _too_large(path: Path, size: int, most: int) -> RouteFileError:
    problem = "the file is too large to look at"
    return RouteFileError(problem, where=str(path), expected=f"at most {most:,} bytes", got=f"{size:,}")


def _refuse_sample(path: Path, given: Given) -> None:
    if given.sample is not None:
        problem = "there is one sequence in this file"
        raise ReplayError(problem, where=str(path), expected="no --sample", got=f"--sample {given.sample}")


def _decoded(read: Callable[[], RoutedExperts], *, where: str = "", **about: Any) -> Sequence:
    """Call `read`, and keep the routes or the error's message; the other arguments are a Sequence's."""
    try:
        return Sequence(routes=read(), **about)
    except ReplayError as error:
        said = error.at(where) if where and where not in str(error) else error
        return Sequence(problem=message(said), **about)


# ---- routes that npu_replay wrote


def _of_folder(path: Path, given: Given) -> tuple[str, Iterator[Sequence]]:
    store = RouteStore(path)
    if given.sample is not None and given.sample not in store:
        raise ReplayError(
            "no such sample in this folder",
            where=str(path),
            expected=f"one of {len(store)} keys, such as {next(iter(store), 'none')}",
            got=given.sample,
        )
    if given.sample is None and (given.prompts or given.outputs):
        problem = "these ids are one sample's"
        raise ReplayError(problem, where=str(path), expected="--sample KEY with them", got="no --sample")
    keys = list(store) if given.sample is None else [given.sample]
    found = (_of_saved(partial(store.__getitem__, key), given, f"{path}, {key}", key) for key in keys)
    return f"a folder of RouteStore, {len(store):,} samples", found


def _of_saved(read: Callable[[], RoutedExperts], given: Given, where: str, name: str = "") -> Sequence:
    tokens = given.tokens()

    def checked() -> RoutedExperts:
        routes = read()
        if not routes.layers or not routes.recorded.any():
            got = f"none of {len(routes)}"
            raise RouteFileError(
                "there is no route in it", where=where, expected="a row with a route", got=got
            )
        if given.model is not None:
            _check_model(routes, given.model, where)
        if tokens is not None:
            _check_tokens(routes, tokens, where)
        return routes

    lacking = (
        (given.model is None, _NO_MODEL),
        (tokens is None, "its tokens: give the ids (--prompt-ids, --output-ids)"),
    )
    return _decoded(checked, where=where, name=name, unchecked=tuple(what for one, what in lacking if one))


def _check_model(routes: RoutedExperts, model: RoutedModel, where: str) -> None:
    alike = (routes.num_experts, routes.topk) == (model.num_experts, model.topk)
    if not alike or not {*routes.layers} <= {*model.layers}:
        raise RouterError(
            "these are routes of another model",
            where=where,
            expected=f"top-{model.topk} of {model.num_experts} experts in some of layers {model.layers}",
            got=f"top-{routes.topk} of {routes.num_experts} in layers {routes.layers}",
        )


def _check_tokens(routes: RoutedExperts, tokens: Array, where: str) -> None:
    if len(tokens) != len(routes):
        problem = "these are routes of another number of tokens"
        raise MicroBatchError(problem, where=where, expected=len(tokens), got=len(routes))
    other = find_other_tokens(len(routes), routes.fingerprint, len(tokens), fingerprint(tokens))
    if other is not None:
        raise other.error(MicroBatchError, where)


# ---- what an engine made


def _of_array(
    what: str, path: Path, read: Callable[..., Array], given: Given
) -> tuple[str, Iterator[Sequence]]:
    """Decode rows without an answer around them, [rows, columns, topk]."""
    _refuse_sample(path, given)
    model, tokens = given.needed_model(str(path)), given.tokens()
    if given.engine is None:
        source = Source(engine=str(path))
    else:
        answers = vllm if given.engine == "vllm" else sglang
        source = replace(answers.source(given.version), field=str(path))
        what += f" of {_named(given.engine, given.version)}"

    def routes() -> RoutedExperts:
        rows = read(source=source)
        # Where nobody names the tokens, all get one id: rows that are alike are then no fault.
        ids = np.zeros(given.start + len(rows) + 1, np.int64) if tokens is None else tokens
        return admit(rows, model=model, tokens=ids, source=source, start=given.start)

    unchecked = () if tokens is not None else (f"rows against tokens, {_NO_TOKENS}",)
    return what, iter([_decoded(routes, named=tokens is not None, unchecked=unchecked)])


def _of_answer(path: Path, answer: Any, given: Given) -> tuple[str, Iterator[Sequence]]:
    engine, version = given.engine or whose(answer), given.version
    if engine is None:
        server_answers.opened(answer, str(path), KINDS)  # raises the server's own words, if these are such
        raise RouteFileError(
            "there are no routes in this JSON, and whose answer it is can't be told",
            where=str(path),
            expected="routed_experts or prompt_routed_experts (vLLM), meta_info or sglext (SGLang)",
            got=sorted(map(str, answer))[:8] if isinstance(answer, dict) else type(answer).__name__,
            cause="an engine or a request that wasn't asked for routes, or a file of something else; "
            "--engine vllm or sglang names the engine",
        )
    if engine == "vllm" and not version and isinstance(answer, dict):
        version = vllm.said_release(answer)
    model = given.needed_model(str(path))
    read = _of_vllm if engine == "vllm" else _of_sglang
    found = list(read(answer, version, model, given))
    chosen = [one for number, one in enumerate(found) if given.sample in (None, str(number), one.name)]
    if not chosen:
        wanted = f"0 to {len(found) - 1}"
        raise ReplayError(
            "no such sequence in this answer", where=str(path), expected=wanted, got=given.sample
        )
    return f"an answer of {_named(engine, version)}", iter(chosen)


def whose(answer: Any) -> Engine | None:
    """Return the engine that gave this answer, by the names of its fields; None if it can't be told."""
    if isinstance(answer, list):
        return "sglang" if answer and all(whose(one) == "sglang" for one in answer) else None
    if not isinstance(answer, Mapping):
        return None
    listed = answer.get("choices")
    choices = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    if "prompt_routed_experts" in answer or any("routed_experts" in one for one in choices):
        return "vllm"
    fields = {*answer, *(field for one in choices for field in one)}
    if fields & {"sglext", "meta_info", "matched_stop", "routed_experts"}:
        return "sglang"
    return "vllm" if fields & {"stop_reason", "prompt_logprobs", "kv_transfer_params"} else None


def _of_vllm(answer: Any, version: str, model: RoutedModel, given: Given) -> Iterator[Sequence]:
    found = vllm.read(answer, version)
    for one in found:
        name = f"completion {one.number}" if len(found) > 1 else ""
        yield _of_one(one, one.number, name, model, given)


def _of_sglang(answer: Any, version: str, model: RoutedModel, given: Given) -> Iterator[Sequence]:
    several = answer if isinstance(answer, list) else [answer]
    for number, one in enumerate(several):
        name = f"answer {number}" if len(several) > 1 else ""
        try:
            read = sglang.read(one, version)
        except ReplayError as error:
            yield Sequence(name=name, problem=message(error))
            continue
        yield _of_one(read, number, name, model, given)


def _of_one(
    one: server_answers.Answer,
    number: int,
    name: str,
    model: RoutedModel,
    given: Given,
) -> Sequence:
    """Decode one sequence of an answer by its engine's decoder."""
    prompt, output, named = _ids_of(one, *given.ids(number))
    read = partial(one.routes, model, prompt, output, given.start)
    return _decoded(read, name=name, named=named, unchecked=() if named else (_NO_TOKENS,))


def _ids_of(
    one: server_answers.Answer, prompt: Array | None, output: Array | None
) -> tuple[Array | None, Array | None, bool]:
    """Return the ids to decode with, and whether they are the sequence's own. Where an answer only counts its
    tokens, all get one id: rows that are alike are then no fault."""
    named = True
    if prompt is None and one.prompt_ids is None:
        prompt, named = _counted(one.prompt_tokens), False
    if output is None and one.output_ids is None:
        output, named = _counted(one.completion_tokens), False
    return prompt, output, named


def _counted(count: int | None) -> Array | None:
    return np.zeros(count, np.int64) if count is not None and count < _MOST_TOKENS else None


def _named(engine: Engine, version: str) -> str:
    return f"{NAMES[engine]} {version or '(release not given)'}"


# ---- JSON


def _parsed(path: Path, data: bytes) -> Any:
    """Parse JSON after a byte order mark and the headers that `curl -i` writes."""
    if len(data) > MOST_TEXT:
        raise _too_large(path, len(data), MOST_TEXT)
    text = data.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
    while text.startswith(b"HTTP/"):  # 100 Continue has headers of its own
        text = text.replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")[2]
    try:
        return json_text.parse(text)
    except ValueError as error:
        streamed = text[:5] == b"data:"
        raise RouteFileError(
            "this is a stream of pieces" if streamed else "nobody knows what this file is",
            where=str(path),
            expected=KINDS,
            got=f"a file that begins with {text[:24]!r} ({str(error)[:200]})",
            cause="routes come with whole answers: ask for one with stream=false" if streamed else "",
        ) from error


def token_lists(path: Path | None) -> tuple[Array, ...]:
    """Read token ids from a JSON file: one list, or a list of them; [tokens] int64 each.

    Raises:
        ReplayError: something else is in it.
    """
    if path is None:
        return ()
    value = _parsed(path, _contents(path))
    nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    try:
        lists = [np.asarray(one) for one in (value if nested else [value])]
        if any(ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") for ids in lists):
            raise ValueError("no list of integers")
        return tuple(ids.astype(np.int64) for ids in lists)
    except (ValueError, OverflowError) as error:
        wanted = "JSON: [1, 2, 3], or a list of such"
        raise ReplayError("these aren't token ids", where=str(path), expected=wanted, got=error) from error
