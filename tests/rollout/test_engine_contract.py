"""What the decoder of every engine promises, whichever it is: one table of engines, one list of tests.

What is of one engine alone is in `tests/compat/vllm` and `tests/compat/sglang`.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

import sglang_outputs
import vllm_outputs
from npu_replay import RoutedExperts
from npu_replay.compat.sglang import decode as sglang
from npu_replay.compat.vllm import decode as vllm
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array
from vllm_outputs import DEEPSEEK, QWEN, WIDE, Sampled, expected, sampled

MODEL = DEEPSEEK
ONE = sampled(MODEL)
RUN = len(ONE.tokens) - 1
"""Tokens that the engine ran."""


Form: TypeAlias = "tuple[str, Any, RoutedModel, Sampled, dict[str, Any]]"
"""What it is, the answer, its model, what it has to give, and what the decoder is told beside it."""


@dataclass(frozen=True)
class Engine:
    """An engine, and where its answer of one release holds what.

    Attributes:
        answer: what a sequence is answered with, its token ids in it.
        sampled, start: what its decoder calls the sampled ids, and the first row's token.
        place, payload: the part of an answer that holds the routes, and their name in it.
        forms: an answer in each form of each release.
    """

    name: str
    version: str
    decoder: Callable[..., Any]
    answer: Callable[[Sampled], dict[str, Any]]
    sampled: str
    start: str
    place: Callable[[dict[str, Any]], dict[str, Any]]
    counts: Callable[[dict[str, Any]], dict[str, Any]]
    ids: Callable[[dict[str, Any]], dict[str, Any]]
    output_ids: str
    forms: Callable[[], Iterator[Form]]

    def decode(self, answer: Any, model: Any = MODEL, **how: Any) -> RoutedExperts:
        named = {"output": self.sampled, "start": self.start, "prompt": "prompt_token_ids"}
        options = {"version": self.version} | {named.get(name, name): value for name, value in how.items()}
        decoded = self.decoder(answer, model, **options)
        return decoded[0] if isinstance(decoded, list) else decoded

    def put(self, answer: dict[str, Any], rows: Any) -> dict[str, Any]:
        self.place(answer)["routed_experts"] = rows
        return answer

    def without_ids(self, sample: Sampled, *, counted: bool = True) -> dict[str, Any]:
        """An answer that only counts its tokens, or not even that."""
        answer = self.answer(sample)
        self.ids(answer)["prompt_token_ids"] = self.ids(answer)[self.output_ids] = None
        if not counted:
            for name in ("prompt_tokens", "completion_tokens"):
                self.counts(answer).pop(name)
        return answer


def from_sglang(sample: Sampled) -> dict[str, Any]:
    return sglang_outputs.Request(
        "0.5.23", sample.prompt, sample.output, engine_rows(sample), finish=sample.finish_reason or "length"
    ).generate() | {"prompt_token_ids": sample.prompt}


def engine_rows(sample: Sampled) -> Array:
    return vllm_outputs.engine_rows("0.20.2", MODEL, sample)


def forms_of_vllm() -> Iterator[Form]:
    """RequestOutputs of all releases, on vllm-ascend too; answers of three endpoints from 0.21 on."""
    models = (DEEPSEEK, QWEN, WIDE)
    every = [(version, model) for version in ("0.14.0", "0.21.0", "0.33.0") for model in models]
    # Of those after 0.22 the first that answer otherwise.
    versions = ("0.16.0", "0.18.0", "0.20.2", "0.22.0", "0.28.0", "0.30.0", "0.31.0", "0.32.0")
    every += [(version, models[number % 3]) for number, version in enumerate(versions)]
    for (version, model), output in itertools.product(every, (40, 1)):
        sample = sampled(model, output=output)
        ascend = {} if output > 1 else {"vllm_ascend": f"{version}rc1"}
        made = vllm_outputs.request_output(version, model, sample)
        yield f"{version} {model}", made, model, sample, {"version": version} | ascend
        for endpoint in ("completions", "chat", "generate") if version >= "0.21" else ():
            how = {"version": version} if version > "0.30" else {"prompt": sample.prompt}  # generate lacks it
            answer = vllm_outputs.answer(version, model, sample, endpoint=endpoint)
            yield f"{version} {endpoint} {model}", json.dumps(answer), model, sample, how
        if version >= "0.21":  # T37: a gateway took the routes out, the rest went on without them
            taken = {key: answer[key] for key in ("prompt_routed_experts",) if key in answer}
            taken["choices"] = [
                {"index": 0, "routed_experts": choice["routed_experts"]} for choice in answer["choices"]
            ]
            both = {"version": version, "prompt": sample.prompt, "output": sample.output}
            yield f"{version} routes alone {model}", taken, model, sample, both


def forms_of_sglang() -> Iterator[Form]:
    """meta_info alone, /generate with and without text, both OpenAI endpoints, some without a version."""
    rows = engine_rows(ONE)
    for version in sglang_outputs.RELEASES:
        asked = sglang_outputs.Request(version, ONE.prompt, ONE.output, rows)
        prompt = {"prompt": ONE.prompt}
        both = {"prompt": ONE.prompt, "output": ONE.output}
        made: list[tuple[Any, dict[str, Any]]] = [
            (asked.generate(), prompt),
            (asked.generate(skip_tokenizer_init=True), both),
            (asked.meta_info(), both | {"version": None}),
            (asked.generate() | {"prompt_token_ids": ONE.prompt}, {}),
        ]
        if asked.since("0.5.9"):
            kinds = ("chat.completion", "text_completion")
            made += [(asked.openai(kind), both | {"version": None}) for kind in kinds]
            made.append(({"sglext": asked.openai()["sglext"]}, both))  # T37: the rest went on without it
        for number, (answer, how) in enumerate(made):
            yield f"{version} {number}", answer, MODEL, ONE, {"version": version} | how


ENGINES = [
    Engine(
        "vLLM",
        "0.33.0",
        vllm.from_vllm,
        lambda sample: vllm_outputs.answer("0.33.0", MODEL, sample),
        sampled="output_token_ids",
        start="start",
        place=lambda answer: answer["choices"][0],
        counts=lambda answer: answer["usage"],
        ids=lambda answer: answer["choices"][0],
        output_ids="token_ids",
        forms=forms_of_vllm,
    ),
    Engine(
        "SGLang",
        "0.5.23",
        sglang.from_sglang,
        from_sglang,
        sampled="output_ids",
        start="start_len",
        place=lambda answer: answer["meta_info"],
        counts=lambda answer: answer["meta_info"],
        ids=lambda answer: answer,
        output_ids="output_ids",
        forms=forms_of_sglang,
    ),
]

pytestmark = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def refused(*words: str) -> Any:
    """An InvalidRoutes with these words, in this order."""
    return pytest.raises(InvalidRoutes, match="(?s)" + ".*".join(map(re.escape, words)))


# ---- the forms of an answer


def test_each_release_in_each_form_gives_the_true_routes(engine: Engine) -> None:
    for name, answer, model, sample, how in engine.forms():
        before = json.dumps(answer, default=repr)
        assert engine.decode(answer, model, **how) == expected(model, sample), name
        assert before == json.dumps(answer, default=repr), name  # T37: it isn't changed


def test_lost_rows_are_refused_or_left_to_the_router_t23(engine: Engine) -> None:
    """Every other fault of rows: test_admit.py; which release makes which: tests/compat."""
    rows = engine_rows(ONE)
    rows[16:32] = 0
    answer = engine.put(engine.answer(ONE), rows)
    with refused(engine.name, f"16 of {RUN} rows are zeros", "Usual cause"):
        engine.decode(answer)
    routes = engine.decode(answer, missing="native")
    assert (~routes.recorded).nonzero()[:, 0].tolist() == [*range(16, 32), RUN]


def test_an_answer_may_be_a_dict_json_or_an_object_of_openais_client(engine: Engine) -> None:
    answer = engine.answer(ONE)
    text = json.dumps(answer)
    client = SimpleNamespace(choices=[], model_dump=lambda: answer)
    for form in (text, text.encode(), bytearray(text.encode()), client):
        assert engine.decode(form) == expected(MODEL, ONE)


def test_an_answer_of_a_release_that_isnt_told_is_decoded(engine: Engine) -> None:
    for version in (None, "", "main", "0.1.dev123+g1a2b3c"):
        assert engine.decode(engine.answer(ONE), version=version) == expected(MODEL, ONE)


# ---- token ids


@pytest.mark.parametrize("container", [tuple, torch.tensor, lambda ids: np.array(ids, np.uint32)])
def test_token_ids_may_come_in_any_container(engine: Engine, container: Any) -> None:
    answer = engine.without_ids(ONE)
    how = {"prompt": container(ONE.prompt), "output": container(ONE.output)}
    assert engine.decode(answer, **how) == expected(MODEL, ONE)
    engine.ids(answer)["prompt_token_ids"] = container(ONE.prompt)
    engine.ids(answer)[engine.output_ids] = container(ONE.output)
    assert engine.decode(answer) == expected(MODEL, ONE)


def test_token_ids_that_the_answer_lacks_must_be_given(engine: Engine) -> None:
    answer = engine.without_ids(ONE)
    with refused("prompt_token_ids= here, got neither"):
        engine.decode(answer)
    with refused(f"{engine.sampled}= here, got neither"):
        engine.decode(answer, prompt=ONE.prompt)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("prompt", "output", "which", "words"),
    [
        (ONE.prompt[1:], ONE.output, 0, ("70 ids", "69")),  # without the BOS that the engine puts in front
        (ONE.prompt[:-1], ONE.tokens[69:], 0, ("70 ids", "69")),  # a token moved to the output
        (ONE.prompt, [*ONE.output, 7], 1, ("40 ids", "41")),
        ([7, *ONE.prompt[1:]], ONE.output, 0, ("70 ids, as in", "70 others")),
        (ONE.prompt, [7, *ONE.output[1:]], 1, ("40 ids, as in", "40 others")),
        (ONE.prompt, ONE.output[1:], 1, ("40 ids", "39")),  # the first is gone, the others are its own
    ],
)
def test_other_token_ids_than_the_engine_ran_are_refused(
    engine: Engine, prompt: list[int], output: list[int], which: int, words: tuple[str, str], named: bool
) -> None:
    """Else each row would be the next token's. By the ids in the answer, or by how many it counts."""
    if not named and len(prompt) == 70 and len(output) <= 40:
        return  # as many: the answer has to name them
    answer = engine.answer(ONE) if named else engine.without_ids(ONE)
    name = ("prompt_token_ids", engine.sampled)[which]
    with refused(f"{name}: the token ids given here aren't those", f"Expected {words[0]}", f"got {words[1]}"):
        engine.decode(answer, prompt=prompt, output=output)


@pytest.mark.parametrize("named", [True, False])
def test_tokens_that_were_taken_off_the_end_take_their_rows_along(engine: Engine, named: bool) -> None:
    """A stop string that the caller looks for: the answer's ids say how many, or its count. The last token
    that is left ran, too, so it has its row."""
    sample = replace(ONE, finish_reason="stop")
    short = replace(sample, output=sample.output[:25], rows=sample.rows[: len(sample.prompt) + 25])
    answer = engine.answer(sample) if named else engine.without_ids(sample)
    routes = engine.decode(answer, prompt=sample.prompt, output=short.output)
    assert routes == expected(MODEL, short, rows=len(short.tokens))
    with refused("tokens"):  # where nothing counts them
        engine.decode(engine.without_ids(sample, counted=False), prompt=sample.prompt, output=short.output)


def test_the_last_piece_of_a_stream_has_its_own_ids_alone(engine: Engine) -> None:
    answer = engine.answer(ONE)
    engine.ids(answer)[engine.output_ids] = ONE.output[-3:]
    assert engine.decode(answer, output=ONE.output) == expected(MODEL, ONE)
    with refused("tokens"):
        engine.decode(answer)


# ---- rows


@pytest.mark.parametrize("start", [1, 64, 70, np.int64(5)])
def test_rows_before_the_start_have_no_route(engine: Engine, start: Any) -> None:
    answer = engine.put(engine.answer(ONE), engine_rows(ONE)[start:])
    assert engine.decode(answer, start=start) == expected(MODEL, ONE, start=start)
    with refused("tokens", f"Expected {RUN} rows", f"got {RUN - start}"):  # that nobody told
        engine.decode(answer)


@pytest.mark.parametrize("finish", ["length", "abort"])
@pytest.mark.parametrize("rows", [slice(10, None), slice(RUN - 1), None])
def test_rows_for_other_tokens_are_refused_whether_aborted_or_not(
    engine: Engine, finish: str, rows: slice | None
) -> None:
    """Which tokens they are of can't be known: the first, or those from a start on that nobody said."""
    sample = replace(ONE, finish_reason=finish)
    there = engine_rows(sample)
    some = np.concatenate([there, there[:1]]) if rows is None else there[rows]
    with refused("tokens", f"Expected {RUN} rows", f"got {len(some)}"):
        engine.decode(engine.put(engine.answer(sample), some))


def test_t28_an_aborted_request_has_all_its_rows_or_none(engine: Engine) -> None:
    sample = replace(ONE, finish_reason="abort")
    assert engine.decode(engine.answer(sample)) == expected(MODEL, sample)
    for nothing in (None, engine_rows(sample)[:0]):
        assert engine.decode(engine.put(engine.answer(sample), nothing)) == expected(MODEL, sample, rows=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, ">u2"])
def test_t10_read_only_ids_become_routes_that_can_be_written(engine: Engine, dtype: Any) -> None:
    """verl #5519: what is decoded from text is read-only, and torch warns or crashes."""
    rows = engine_rows(ONE).astype(dtype)
    payload = np.frombuffer(rows.tobytes(), dtype).reshape(rows.shape)
    torch.set_warn_always(True)  # else only the first time in a process
    try:
        for form in (payload, payload[:, 2:], np.asfortranarray(rows)):
            routes = engine.decode(engine.put(engine.answer(ONE), form))
            assert routes == expected(MODEL, ONE)
            routes.ids.zero_()
            np.testing.assert_array_equal(payload, rows)
    finally:
        torch.set_warn_always(False)


ROWS = engine_rows(ONE)
SOMETHING_ELSE: dict[str, Any] = {
    "no base64": "%%%%",
    "cut": base64.b64encode(ROWS.astype("<i4").tobytes()[:-1]).decode(),
    "an npy cut short": vllm_outputs.npy(ROWS)[:-400],
    "a pickle": vllm_outputs.npy(np.array([{}], object)),
    "a flat npy": vllm_outputs.npy(ROWS.reshape(-1)[:-8]),
    **{f"{value!r}": value for value in (7, {"a": 1}, {}, len, [[[1, 2]]])},
    "too many lists": ROWS.tolist() * 40,
    "floats": torch.zeros(RUN, 7, 8),
    "float8": torch.zeros(RUN, 7, 8, dtype=torch.float8_e4m3fn),
    "sparse": torch.tensor(ROWS).to_sparse(),
    **{str(array.dtype): array for array in (np.zeros((RUN, 7, 8)), np.array(["a"]), np.array(7))},
    "negative": np.where(ROWS[5, 3, 0] == ROWS, -1, ROWS),
    "an expert twice": np.repeat(ROWS[..., ::2], 2, axis=2),
    "one row for all": np.repeat(ROWS[:1], RUN, axis=0),
}


@pytest.mark.parametrize("value", SOMETHING_ELSE.values(), ids=SOMETHING_ELSE)
def test_what_are_no_rows_is_refused_with_the_sample_and_the_field(engine: Engine, value: Any) -> None:
    for missing in ("error", "native"):
        with refused(f"{engine.name} {engine.version}, request", "routed_experts", ": "):
            engine.decode(engine.put(engine.answer(ONE), value), missing=missing)


# ---- the rest

# what the server said instead, and the words that quote it or say what it is
REFUSED: list[tuple[Any, str]] = [
    ({"error": {"message": "The model `m` does not exist.", "code": 404}}, "«The model `m` does not exist.»"),
    ({"object": "error", "message": "too long", "type": "BadRequestError"}, "«too long»"),
    ({"error": "out of memory"}, "«out of memory»"),
    (
        {"detail": [{"loc": ["body", "prompt"], "msg": "Field required"}, {"loc": ["n"], "msg": "no int"}]},
        "'msg': 'Field required'",
    ),
    ({"choices": [], "error": {"message": "x" * 10_000}}, "x" * 300 + "»"),
    ({"detail": {"code": 7}}, "{'code': 7}"),
    *(('{"choices": [{', "cut off on its way"), ("[" * 100_000, "cut off on its way")),
    *(('data: {"id": 1}\n\n', "a stream"), (b"<html>502</html>", "a stream"), (b"\xff\xfe\x00", "a stream")),
    ('{"meta_info": {"prompt_tokens": ' + "9" * 10_000 + "}}", "cut off"),
    ([{"choices": []}] * 6, "one by one"),
    *((data, "") for data in (None, [{}], "null", 7, {"choices": 3}, {"choices": ["a"]}, {"id": "x"})),
    *((data, "") for data in (ROWS, len, [SimpleNamespace(outputs=[])])),
]


@pytest.mark.parametrize(("data", "words"), REFUSED, ids=lambda data: repr(data)[:20])
def test_what_is_no_answer_is_refused_with_what_it_is(engine: Engine, data: Any, words: str) -> None:
    for form in (data, json.dumps(data)) if isinstance(data, dict) else (data,):
        with refused(engine.name, "Expected", words) as caught:
            engine.decode(form, prompt=[1], output=[2])
        assert len(str(caught.value)) < 1000


CLEAR = "\x1b[2J\x1b]0;owned\x07"
WORDS = [CLEAR, "\ud800", "\u202e", "\x9b31m", "one\rtwo\nthree", "x" * 100_000]
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


@pytest.mark.parametrize("words", WORDS, ids=lambda words: ascii(words)[:12])
def test_a_servers_words_are_quoted_on_one_line_and_printable(engine: Engine, words: str) -> None:
    for detail in (words, [[[[words]]]], {"msg": words, "loc": [words, {words: words}]}, {words: [words]}):
        with refused("the server refused the request") as caught:
            engine.decode({"detail": detail}, prompt=[1], output=[2])
        error = caught.value
        assert "three\n" not in str(error)
        for text in (str(error), error.problem, error.where, error.cause):
            assert not CONTROL.search(text), ascii(text)
            assert len(text) < 3000
            text.encode()
