"""inspect: decode each sequence in a file or folder of routes, or report the error that refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from npu_replay.compat.sglang import decode as sglang
from npu_replay.compat.vllm import decode as vllm
from npu_replay.errors import MicroBatchError, ReplayError, RouteFileError, RouterError, quoted
from npu_replay.inspection.findings import Inspection
from npu_replay.rollout import payloads, server_answers
from npu_replay.rollout.admit import admit
from npu_replay.rollout.envelope import of_choice
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import Fault, Source, Symptom
from npu_replay.routes.atomic_file import plain_file
from npu_replay.routes.checks import Array
from npu_replay.routes.encoding import read_errors_as
from npu_replay.routes.fingerprint import as_token_ids, find_other_tokens, fingerprint
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.store import RouteStore

Engine = Literal["vllm", "sglang"]
NAMES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
KINDS = (
    "routes that RoutedExperts.save or to_bytes made, a folder of RouteStore, an .npy array, or a whole "
    "answer of vLLM or SGLang as JSON"
)
_NO_MODEL = "layers and experts against the model: give --config"
_NO_IDS = "its tokens: give the ids (--prompt-ids, --output-ids)"
_NO_FINGERPRINT = "its tokens but for their number: these routes have no fingerprint"
_NO_TOKENS = "rows and layers that are alike for other tokens: give the ids (--prompt-ids, --output-ids)"
_OF_ARRAYS = (
    Fault(
        Symptom.ZERO_ROWS,
        cause="padding, or tokens that the engine didn't run. "
        "RoutedExperts(recorded=) says which rows have a route",
    ),
    Fault(
        Symptom.ZEROS,
        cause="an engine that captured nothing; on vllm-ascend NPU_REPLAY_VLLM_ASCEND=on captures",
    ),
    Fault(
        Symptom.COLUMNS,
        cause="another model's config, or an array [layers, tokens, topk] for [tokens, layers, topk]",
    ),
)


def inspect(
    path: Path,
    *,
    config: Path | None = None,
    version: str = "",
    prompt_ids: Path | None = None,
    output_ids: Path | None = None,
    start: int = 0,
    sample: str | None = None,
) -> Inspection:
    """Decode each sequence of a file or a folder, as `from_vllm`, `from_sglang` and `load` do.

    Args:
        path: see `KINDS`.
        config: the model's config.json, or its folder; an engine's rows can't be decoded without.
        version: the engine's release, for the causes of errors.
        prompt_ids, output_ids: JSON of a list of token ids.
        start: the token of the first row (`routed_experts_prompt_start`, `routed_experts_start_len`).
        sample: a store's key, or the number of an answer's completion: only that one.

    Raises:
        ReplayError: nothing can be read, or the other arguments don't fit it. The Inspection says why a
            sequence is refused.

    >>> routes = npu_replay.RoutedExperts(ids=np.arange(8).reshape(2, 2, 2), layers=(0, 1), num_experts=8)
    >>> routes.save("routes")
    >>> inspect(Path("routes")).good
    True
    """
    reader = _Reader(
        path=path,
        findings=Inspection(path=str(path)),
        model=None if config is None else RoutedModel.from_config(config),
        version=version,
        prompt=_token_ids(prompt_ids),
        output=_token_ids(output_ids),
        start=start,
        sample=sample,
    )
    if path.is_dir():
        reader.add_folder()
        return reader.findings
    begins = _contents(path, 9)
    if begins.startswith(b"\x93NUMPY"):
        reader.add_array(_contents(path))
    elif begins[7:9] == b"\0{":  # eight bytes of a length, then JSON; in a text no byte is 0
        reader.refuse_sample()
        reader.findings.what = "a file of RoutedExperts.save or to_bytes"
        reader.add_saved(lambda: RoutedExperts.load(path), str(path))
    else:
        reader.add_answer(_parsed(path))
    return reader.findings


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Holds the arguments of `inspect` and its findings.

    Attributes:
        prompt, output: [tokens] int64; None if not given.
    """

    path: Path
    findings: Inspection
    model: RoutedModel | None
    version: str
    prompt: Array | None
    output: Array | None
    start: int
    sample: str | None

    def tokens(self) -> Array | None:
        parts = [ids for ids in (self.prompt, self.output) if ids is not None]
        return np.concatenate(parts) if parts else None

    def needed_model(self) -> RoutedModel:
        if self.model is None:
            raise ReplayError(
                "an engine's rows don't say which layers and experts they are of",
                where=str(self.path),
                expected="--config, the model's config.json or its folder",
                got="no --config",
            )
        return self.model

    def refuse_sample(self) -> None:
        ReplayError.unless(
            self.sample is None,
            "there is one sequence in this file",
            where=str(self.path),
            expected="no --sample",
            got=f"--sample {self.sample}",
        )

    # Routes that npu_replay wrote

    def add_folder(self) -> None:
        store = RouteStore(self.path)
        where = str(self.path)
        ReplayError.unless(
            self.sample is None or self.sample in store,
            "no such sample in this folder",
            where=where,
            expected=f"one of {len(store)} keys, such as {next(iter(store), 'none')}",
            got=self.sample,
        )
        self.findings.what = f"a folder of RouteStore, {len(store):,} samples"
        for key in list(store) if self.sample is None else [self.sample]:
            self.add_saved(partial(store.__getitem__, key), f"{where}, {key}", key)

    def add_saved(self, read: Callable[[], RoutedExperts], where: str, name: str = "") -> None:
        """Add saved routes, compared with the model and the tokens where they are known."""
        model, tokens = self.model, self.tokens()
        lacking = [what for what, known in ((_NO_MODEL, model), (_NO_IDS, tokens)) if known is None]

        def checked() -> RoutedExperts:
            routes = read()
            RouteFileError.unless(
                bool(routes.layers and routes.recorded.any()),
                "there is no route in it",
                "a row with a route",
                f"none of {len(routes)}",
                where=where,
            )
            if model is not None:
                alike = (routes.num_experts, routes.topk) == (model.num_experts, model.topk)
                RouterError.unless(
                    alike and {*routes.layers} <= {*model.layers},
                    "these are routes of another model",
                    f"top-{model.topk} of {model.num_experts} experts in some of layers {model.layers}",
                    f"top-{routes.topk} of {routes.num_experts} in layers {routes.layers}",
                    where=where,
                )
            if tokens is not None:
                other = find_other_tokens(len(routes), routes.fingerprint, len(tokens), fingerprint(tokens))
                if other is not None:
                    raise other.error(MicroBatchError, where)
                if routes.fingerprint is None:
                    lacking.append(_NO_FINGERPRINT)
            return routes

        self.findings.add(checked, name=name, unchecked=lacking)

    # What an engine made

    def add_array(self, npy: bytes) -> None:
        """Add rows without an answer around them, [rows, columns, topk]; the last token's may be -1."""
        self.refuse_sample()
        model, tokens = self.needed_model(), self.tokens()
        source = Source(engine=str(self.path), faults=_OF_ARRAYS)
        self.findings.what = "an .npy array"

        def routes() -> RoutedExperts:
            rows = payloads.from_npy(npy, source=source)
            if tokens is None:
                self.findings.what += "; no engine runs the last token, whose row is left out, or -1"
            if len(rows) and (rows[-1] == -1).all():
                rows = rows[:-1]
            # Unknown tokens all get one id, so that equal rows are no fault.
            ids = np.zeros(self.start + len(rows) + 1, np.int64) if tokens is None else tokens
            return admit(rows, model=model, tokens=ids, source=source, start=self.start)

        unchecked = [] if tokens is not None else [f"rows against tokens, {_NO_TOKENS}"]
        self.findings.add(routes, named=tokens is not None, unchecked=unchecked)

    def add_answer(self, answer: Any) -> None:
        """Add the sequences of an engine's answer, decoded as its decoder does."""
        engine = whose(answer)
        version = self.version
        if engine is None:
            server_answers.opened(answer, str(self.path), KINDS)  # raises if it is a server's error
            raise RouteFileError(
                "there are no routes in this JSON, and whose answer it is can't be told",
                where=str(self.path),
                expected="routed_experts or prompt_routed_experts (vLLM), meta_info or sglext (SGLang)",
                got=sorted(map(quoted, answer))[:8] if isinstance(answer, dict) else type(answer).__name__,
                cause="an engine or a request that wasn't asked for routes, or a file of something else",
            )
        model = self.needed_model()
        several: list[tuple[str, Any]]
        if engine == "vllm":
            version = version or (vllm.said_release(answer) if isinstance(answer, dict) else "")
            read = vllm.read(answer, version)
            several = [(f"completion {part.number}", part) for part in read]
        else:
            listed = answer if isinstance(answer, list) else [answer]
            several = [(f"answer {number}", part) for number, part in enumerate(listed)]
        self.findings.what = f"an answer of {NAMES[engine]} {version or '(release not given)'}"
        chosen = [part for at, part in enumerate(several) if self.sample in (None, str(at), part[0])]
        ReplayError.unless(
            bool(chosen),
            "no such sequence in this answer",
            where=str(self.path),
            expected=f"0 to {len(several) - 1}",
            got=self.sample,
        )
        for name, answer_part in chosen:
            called = name if len(several) > 1 else ""
            try:
                answer_read = sglang.read(answer_part, version) if engine == "sglang" else answer_part
            except ReplayError as error:
                self.findings.refuse(called, error)
                continue
            # Unknown tokens all get one id, so that equal rows are no fault.
            ids_given = [self.prompt, self.output]
            named = True
            known = (
                (answer_read.prompt_ids, answer_read.prompt_tokens),
                (answer_read.output_ids, answer_read.completion_tokens),
            )
            for part, (ids, count) in enumerate(known):
                if ids_given[part] is None and ids is None:
                    ids_given[part] = None if count is None else np.zeros(count, np.int64)
                    named = False
            routes = partial(answer_read.routes, model, ids_given[0], ids_given[1], self.start)
            self.findings.add(routes, name=called, named=named, unchecked=[] if named else [_NO_TOKENS])


def whose(answer: Any) -> Engine | None:
    """Return the engine that gave this answer, by the names of its fields; None if that is unknown."""
    if isinstance(answer, list):
        return "sglang" if answer and all(whose(part) == "sglang" for part in answer) else None
    if not isinstance(answer, Mapping):
        return None
    listed = answer.get("choices")
    choices = [choice for choice in listed if isinstance(choice, Mapping)] if isinstance(listed, list) else []
    named = any("routed_experts" in choice or of_choice(choice)[0] is not None for choice in choices)
    if "prompt_routed_experts" in answer or named:
        return "vllm"
    fields = {*answer, *(field for choice in choices for field in choice)}
    return "sglang" if fields & {"sglext", "meta_info", "routed_experts"} else None


# Files


def _contents(path: Path, most: int = -1) -> bytes:
    """Return the bytes of a plain file, or its first ones."""
    with read_errors_as("the file can't be read", "", path), plain_file(path) as file:
        data: bytes = file.read(most)
    RouteFileError.unless(bool(data), "the file is empty", where=str(path))
    return data


def _parsed(path: Path) -> Any:
    with read_errors_as("nobody knows what this file is", f"a file of something else than {KINDS}", path):
        return json.loads(_contents(path))


def _token_ids(path: Path | None) -> Array | None:
    """Read a JSON list of token ids, [tokens] int64."""
    if path is None:
        return None
    value = _parsed(path)
    ids = as_token_ids(value)
    if ids is None:
        raise ReplayError("these aren't token ids", where=str(path), expected="[1, 2, 3]", got=quoted(value))
    return ids
