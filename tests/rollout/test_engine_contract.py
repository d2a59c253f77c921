"""What the decoder of every engine promises, whichever it is: one table of engines, one list of tests.

Where routes, ids and counts lie, and what is of one engine alone, is in `tests/compat/vllm` and
`tests/compat/sglang`; every release's own form in `test_engine_property.py`.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

import sglang_outputs
import vllm_outputs
from npu_replay import RoutedExperts, fingerprint
from npu_replay.compat.sglang import decode as sglang
from npu_replay.compat.vllm import decode as vllm
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import Symptom
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
        causes: words that an error names once at most.
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
    weigh: Callable[[dict[str, Any], str], None]
    source: Callable[[str], Any]
    forms: Callable[[], Iterator[Form]]
    releases: tuple[str, ...]
    causes: tuple[str, ...]

    def decode(self, answer: Any, model: Any = MODEL, **given: Any) -> RoutedExperts:
        named = {"output": self.sampled, "start": self.start, "prompt": "prompt_token_ids"}
        options = {"version": self.version} | {named.get(name, name): value for name, value in given.items()}
        found = self.decoder(answer, model, **options)
        return found[0] if isinstance(found, list) else found

    def put(self, answer: dict[str, Any], rows: Any) -> dict[str, Any]:
        self.place(answer)["routed_experts"] = rows
        return answer

    def without_ids(self, one: Sampled, *, counted: bool = True) -> dict[str, Any]:
        """An answer that only counts its tokens, or not even that."""
        answer = self.answer(one)
        self.ids(answer)["prompt_token_ids"] = self.ids(answer)[self.output_ids] = None
        if not counted:
            for name in ("prompt_tokens", "completion_tokens"):
                self.counts(answer).pop(name)
        return answer


def from_sglang(one: Sampled) -> dict[str, Any]:
    request = sglang_outputs.Request(
        "0.5.23", one.prompt, one.output, engine_rows(one), finish=one.finish_reason or "length"
    )
    return request.generate() | {"prompt_token_ids": one.prompt}


def engine_rows(one: Sampled) -> Array:
    return vllm_outputs.engine_rows("0.20.2", MODEL, one)


def weigh_vllm(answer: dict[str, Any], version: str) -> None:
    answer["choices"][0]["weight_versions"] = [{"version": version, "start": 0, "end": 40}]


def weigh_sglang(answer: dict[str, Any], version: str) -> None:
    answer["meta_info"]["weight_version"] = version


def forms_of_vllm() -> Iterator[Form]:
    """RequestOutputs of all releases, on vllm-ascend too; answers of three endpoints from 0.21 on."""
    plain = ("0.14.0", "0.16.0", "0.17.1", "0.18.0", "0.19.1", "0.20.0", "0.20.2")
    minors = (*(f"0.{minor}.0" for minor in range(21, 34)), "0.22.1", "0.25.1", "0.27.1")
    for version, model, output in itertools.product((*plain, *minors), (DEEPSEEK, QWEN, WIDE), (40, 1)):
        one = sampled(model, output=output)
        ascend = {} if output > 1 else {"vllm_ascend": f"{version}rc1"}
        made = vllm_outputs.request_output(version, model, one)
        yield f"{version} {model}", made, model, one, {"version": version} | ascend
        endpoints: tuple[vllm_outputs.Endpoint, ...] = ("completions", "chat", "generate")
        for endpoint in endpoints if version >= "0.21" else ():
            given = {"version": version} if version > "0.30" else {"prompt": one.prompt}  # generate lacks it
            answer = vllm_outputs.answer(version, model, one, endpoint=endpoint)
            yield f"{version} {endpoint} {model}", json.dumps(answer), model, one, given
        if version >= "0.21":  # T37: a gateway took the routes out, the rest went on without them
            taken = {key: answer[key] for key in ("prompt_routed_experts",) if key in answer}
            taken["choices"] = [
                {"index": 0, "routed_experts": choice["routed_experts"]} for choice in answer["choices"]
            ]
            both = {"version": version, "prompt": one.prompt, "output": one.output}
            yield f"{version} routes alone {model}", taken, model, one, both


def forms_of_sglang() -> Iterator[Form]:
    """meta_info alone, /generate with and without text, both OpenAI endpoints, some without a version."""
    rows = engine_rows(ONE)
    for version in sglang_outputs.RELEASES:
        asked = sglang_outputs.Request(version, ONE.prompt, ONE.output, rows)
        prompt, both = {"prompt": ONE.prompt}, {"prompt": ONE.prompt, "output": ONE.output}
        made: list[tuple[Any, dict[str, Any]]] = [
            (asked.generate(), prompt),
            (asked.generate(skip_tokenizer_init=True), both),
            (asked.meta_info(), both | {"version": None}),
            (asked.generate() | {"prompt_token_ids": ONE.prompt}, {}),
        ]
        if version in sglang_outputs.WITH_SGLEXT:
            kinds = ("chat.completion", "text_completion")
            made += [(asked.openai(kind), both | {"version": None}) for kind in kinds]
            made.append(({"sglext": asked.openai()["sglext"]}, both))  # T37: the rest went on without it
        for number, (answer, given) in enumerate(made):
            yield f"{version} {number}", answer, MODEL, ONE, {"version": version} | given


def meta_info(answer: dict[str, Any]) -> Any:
    return answer["meta_info"]


def choice(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]


ENGINES = [
    Engine(
        "vLLM",
        "0.33.0",
        vllm.from_vllm,
        lambda one: vllm_outputs.answer("0.33.0", MODEL, one),
        sampled="output_token_ids",
        start="start",
        place=choice,
        counts=lambda answer: answer["usage"],
        ids=choice,
        output_ids="token_ids",
        weigh=weigh_vllm,
        forms=forms_of_vllm,
        source=lambda version: vllm.source(version, ways=("http", "in-process", "alone", "stop string")),
        releases=(
            "",
            "0.13.0",
            "0.17.1",
            "0.18.0",
            "0.20.2",
            "0.21.0",
            "0.22.0",
            "0.27.0",
            "0.31.0",
            "0.33.0",
        ),
        causes=("enable_return_routed_experts", "beam search", "a stream", "another model's", "NeMo-RL"),
    ),
    Engine(
        "SGLang",
        "0.5.23",
        sglang.from_sglang,
        from_sglang,
        sampled="output_ids",
        start="start_len",
        place=meta_info,
        counts=meta_info,
        ids=lambda answer: answer,
        output_ids="output_ids",
        weigh=weigh_sglang,
        source=sglang.source,
        forms=forms_of_sglang,
        releases=("", "0.5.6", "0.5.7", "0.5.9", "0.5.10", "0.5.12", "0.5.13", "0.5.15", "0.5.23"),
        causes=("sglang#26423", "HiCache", "MoE runner", "another model", "decode node"),
    ),
]

pytestmark = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def refused(*words: str) -> Any:
    """An InvalidRoutes with these words, in this order."""
    return pytest.raises(InvalidRoutes, match="(?s)" + ".*".join(map(re.escape, words)))


# ---- the forms of an answer


def test_each_release_in_each_form_gives_the_true_routes(engine: Engine) -> None:
    for name, answer, model, one, given in engine.forms():
        before = copy.deepcopy(answer)
        assert engine.decode(answer, model, **given) == expected(model, one), name
        assert json.dumps(before, default=repr) == json.dumps(answer, default=repr), name


def test_an_answer_may_be_a_dict_json_or_an_object_of_openais_client(engine: Engine) -> None:
    answer = engine.answer(ONE)
    before = copy.deepcopy(answer)
    client = SimpleNamespace(choices=[], model_dump=lambda: answer)
    text = json.dumps(answer)
    for form in (answer, text, text.encode(), bytearray(text.encode()), client):
        assert engine.decode(form) == expected(MODEL, ONE)
    assert answer == before  # T37: it isn't changed


def test_the_model_may_be_its_config(engine: Engine) -> None:
    config = {"num_hidden_layers": 7, "first_k_dense_replace": 2, "n_routed_experts": 256}
    config["num_experts_per_tok"] = 8
    assert engine.decode(engine.answer(ONE), config) == expected(MODEL, ONE)
    with pytest.raises(ReplayError, match="the number of routed experts"):
        engine.decode(engine.answer(ONE), {**config, "n_routed_experts": None})


def test_an_answer_of_a_release_that_isnt_told_is_decoded(engine: Engine) -> None:
    for version in (None, "", "main", "nightly", "0.1.dev123+g1a2b3c"):
        assert engine.decode(engine.answer(ONE), version=version) == expected(MODEL, ONE)
    with pytest.raises(ReplayError, match="a release is told as text"):
        engine.decode(engine.answer(ONE), version=0.33)


# ---- token ids


@pytest.mark.parametrize(
    "container", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint32)]
)
def test_token_ids_may_come_in_any_container(engine: Engine, container: Any) -> None:
    answer = engine.without_ids(ONE)
    given = {"prompt": container(ONE.prompt), "output": container(ONE.output)}
    assert engine.decode(answer, **given) == expected(MODEL, ONE)
    engine.ids(answer)["prompt_token_ids"] = container(ONE.prompt)
    engine.ids(answer)[engine.output_ids] = container(ONE.output)
    assert engine.decode(answer) == expected(MODEL, ONE)


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        ([1, 2.5], "got list [1, 2.5]"),
        (["1", "2"], "got list ['1', '2']"),
        ([float("nan")], "got list [nan]"),
        ([None], "got list [None]"),
        ([1, -1], "got -1 to 1"),
        (np.array([1, 2**63], np.uint64), "got uint64 [2]"),
        ([True, False], "got list [True, False]"),
        ([2**70], "got list [1180591620717411303424]"),
        (7, "got int 7"),
        ("text", "got str text"),
        (b"text", "got bytes"),
        ({1: 2}, "got dict"),
        (torch.ones(109, dtype=torch.bfloat16), "got torch.bfloat16 [109]"),
        (torch.ones(109, dtype=torch.int64).to_sparse(), "got torch.sparse_coo of torch.int64 [109]"),
    ],
)
def test_token_ids_that_are_none_are_refused(engine: Engine, ids: Any, got: str) -> None:
    words = ("these aren't token ids", got)
    for which, name in (("prompt", "prompt_token_ids"), ("output", engine.sampled)):
        with refused(f"{engine.name} {engine.version}, request", f"{name}: ", *words):
            engine.decode(engine.answer(ONE), **{which: ids})
    for key, name in (("prompt_token_ids", "prompt_token_ids"), (engine.output_ids, engine.sampled)):
        answer = engine.answer(ONE)
        engine.ids(answer)[key] = ids
        with refused(f"{engine.name} {engine.version}, request", f"{name}: ", *words):
            engine.decode(answer)


def test_token_ids_that_the_answer_lacks_must_be_given(engine: Engine) -> None:
    answer = engine.without_ids(ONE)
    with refused("hasn't got the prompt token ids", "prompt_token_ids= here, got neither"):
        engine.decode(answer)
    with refused("hasn't got the sampled token ids", f"{engine.sampled}= here, got neither"):
        engine.decode(answer, prompt=ONE.prompt)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("prompt", "output", "which", "expected", "got"),
    [
        (ONE.prompt[1:], ONE.output, 0, "70 ids", "69"),  # without the BOS that the engine puts in front
        ([7, *ONE.prompt], ONE.output, 0, "70 ids", "71"),
        (ONE.prompt[:-1], ONE.tokens[69:], 0, "70 ids", "69"),  # a token moved to the output
        (ONE.prompt, [*ONE.output, 7], 1, "40 ids", "41"),
    ],
)
def test_other_token_ids_than_the_engine_ran_are_refused(
    engine: Engine, prompt: list[int], output: list[int], which: int, expected: str, got: str, named: bool
) -> None:
    """Else each row would be the next token's. By the ids in the answer, or by how many it counts."""
    answer = engine.answer(ONE) if named else engine.without_ids(ONE)
    said = ("ran", "sampled")[which]
    name = ("prompt_token_ids", engine.sampled)[which]
    words = (f"{name}: the token ids given here aren't those that the engine {said}", f"Expected {expected}")
    with refused(*words, f"got {got}", "tokenised again"):
        engine.decode(answer, prompt=prompt, output=output)


def test_as_many_other_token_ids_are_refused(engine: Engine) -> None:
    answer = engine.answer(ONE)
    with refused("prompt_token_ids: ", "aren't those that the engine ran", "70 ids, as in", "got 70 others"):
        engine.decode(answer, prompt=[7, *ONE.prompt[1:]])
    with refused(
        f"{engine.sampled}: ", "aren't those that the engine sampled", "40 ids, as in", "got 40 others"
    ):
        engine.decode(answer, output=[7, *ONE.output[1:]])
    with refused("aren't those that the engine sampled"):  # the first token is gone, the others are its own
        engine.decode(answer, output=ONE.output[1:])


@pytest.mark.parametrize("named", [True, False])
def test_tokens_that_were_taken_off_the_end_take_their_rows_along(engine: Engine, named: bool) -> None:
    """A stop string that the caller looks for: the answer's ids say how many, or its count. The last token
    that is left ran, too, so it has its row."""
    one = replace(ONE, finish_reason="stop")
    short = replace(one, output=one.output[:25], rows=one.rows[: len(one.prompt) + 25])
    answer = engine.answer(one) if named else engine.without_ids(one)
    found = engine.decode(answer, prompt=one.prompt, output=short.output)
    assert found == expected(MODEL, short, rows=len(short.tokens))
    with refused("tokens"):  # where nothing counts them
        engine.decode(engine.without_ids(one, counted=False), prompt=one.prompt, output=short.output)


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


@pytest.mark.parametrize(
    ("start", "words"),
    [
        *((start, "start(_len)? must be a whole number") for start in ("1", 1.5, None)),
        *(
            (start, f"the first row's token isn't in the sequence. Expected 0 to 110, got {start}")
            for start in (-1, 111)
        ),
    ],
)
def test_a_start_that_is_none_is_refused(engine: Engine, start: Any, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        engine.decode(engine.answer(ONE), start=start)


@pytest.mark.parametrize("finish", ["length", "stop", "abort"])
@pytest.mark.parametrize("rows", [slice(90), slice(10, None), slice(RUN - 1), None])
def test_rows_for_other_tokens_are_refused_whether_aborted_or_not(
    engine: Engine, finish: str, rows: slice | None
) -> None:
    """Which tokens they are of can't be known: the first, or those from a start on that nobody said."""
    one = replace(ONE, finish_reason=finish)
    there = engine_rows(one)
    some = np.concatenate([there, there[:1]]) if rows is None else there[rows]
    with refused("tokens", f"Expected {RUN} rows", f"got {len(some)}"):
        engine.decode(engine.put(engine.answer(one), some))


def test_t28_an_aborted_request_has_all_its_rows_or_none(engine: Engine) -> None:
    one = replace(ONE, finish_reason="abort")
    assert engine.decode(engine.answer(one)) == expected(MODEL, one)
    for nothing in (None, engine_rows(one)[:0]):
        answer = engine.put(engine.answer(one), nothing)
        assert engine.decode(answer) == expected(MODEL, one, rows=0)


@pytest.mark.parametrize("missing", ["error", "native"])
def test_a_request_that_ended_without_routes_is_refused(engine: Engine, missing: str) -> None:
    answer = engine.answer(ONE)
    del engine.place(answer)["routed_experts"]
    words = (f"{engine.name} {engine.version}, request", "routed_experts: ", "no routes")
    with refused(*words, "enable_return_routed_experts=True"):
        engine.decode(answer, missing=missing)


def test_one_token_without_a_sample_has_no_rows(engine: Engine) -> None:
    for finish in ("length", "abort"):
        one = sampled(MODEL, prompt=1, output=0, finish_reason=finish)
        assert engine.decode(engine.answer(one)) == expected(MODEL, one)
    two = sampled(MODEL, prompt=2, output=0)
    with refused("no routes"):
        engine.decode(engine.put(engine.answer(two), None))


def test_t23_rows_of_zeros_are_an_error_and_may_be_left_native(engine: Engine) -> None:
    rows = engine_rows(ONE)
    rows[16:32] = 0
    answer = engine.put(engine.answer(ONE), rows)
    with refused("16 of 109 rows are zeros in all layers", "row 16, the last in row 31", "Usual cause"):
        engine.decode(answer)
    routes = engine.decode(answer, missing="native")
    assert (~routes.recorded).nonzero()[:, 0].tolist() == [*range(16, 32), RUN]
    for missing in ("error", "native"):  # an engine that captures nothing isn't one that loses rows
        with refused("all 109 rows are zeros", "Usual cause"):
            engine.decode(engine.put(engine.answer(ONE), rows * 0), missing=missing)


def test_rows_of_another_token_may_be_left_native(engine: Engine) -> None:
    rows = engine_rows(ONE)
    rows[64:80] = rows[:16]
    answer = engine.put(engine.answer(ONE), rows)
    with refused("16 rows are another token's", "Usual cause"):
        engine.decode(answer)
    left = engine.decode(answer, missing="native")
    assert (~left.recorded).nonzero()[:, 0].tolist() == [*range(64, 80), RUN]


def test_a_dense_layer_that_has_experts_is_refused(engine: Engine) -> None:
    rows = engine_rows(ONE)
    rows[5, 1] = range(8)
    with refused("layer 1: a dense layer has experts", "row 5"):
        engine.decode(engine.put(engine.answer(ONE), rows))


def test_another_models_rows_are_refused(engine: Engine) -> None:
    answer = engine.put(engine.answer(ONE), engine_rows(ONE))
    other = replace(MODEL, layers=(2, 3, 4), num_layers=5)
    for model, words in (
        (other, ("neither all decoder layers nor the MoE layers", "5, or 3, got 7")),
        (replace(MODEL, topk=6), ("top-k isn't the model's", "6 ids, got 8")),
        (replace(MODEL, num_experts=64), ("out of range", "0 to 63", "another model")),
    ):
        with refused("request", *words):
            engine.decode(answer, model)


@pytest.fixture
def read_only_is_an_error() -> Iterator[None]:
    """torch says once a process that it was given an array that can't be written, and goes on."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="not writable"):
                torch.from_numpy(np.frombuffer(b"1234", np.int32))
            yield
    finally:
        torch.set_warn_always(before)


@pytest.mark.usefixtures("read_only_is_an_error")
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.int16, ">u2"])
def test_t10_read_only_ids_become_routes_that_can_be_written(engine: Engine, dtype: Any) -> None:
    """verl #5519: what is decoded from text is read-only, and torch warns or crashes."""
    rows = engine_rows(ONE).astype(dtype)
    payload = np.frombuffer(rows.tobytes(), dtype).reshape(rows.shape)
    assert not payload.flags.writeable
    for form in (payload, payload[:, 2:], np.asfortranarray(rows)):
        routes = engine.decode(engine.put(engine.answer(ONE), form))
        assert routes == expected(MODEL, ONE)
        routes.ids.zero_()
        np.testing.assert_array_equal(payload, rows)
    if rows.dtype.isnative and rows.dtype != np.uint16:
        held = torch.from_numpy(rows)
        routes = engine.decode(engine.put(engine.answer(ONE), held))
        held.zero_()
        assert routes == expected(MODEL, ONE)


ROWS = engine_rows(ONE)
SOMETHING_ELSE: dict[str, Any] = {
    **{f"text {text!r}": text for text in ("%%%%", "QUJD\nQUJD", "QUJDR", "é" * 8, "A" * 800_000)},
    "cut": base64.b64encode(ROWS.astype("<i4").tobytes()[:-1]).decode(),
    "an npy cut short": vllm_outputs.npy(ROWS)[:-400],
    "a pickle": vllm_outputs.npy(np.array([{}], object)),
    "a flat npy": vllm_outputs.npy(ROWS.reshape(-1)[:-8]),
    **{f"{value!r}": value for value in (7, 1.5, {"a": 1}, {}, len, [[[1, 2]]], [[1], [2, 3]])},
    "too many lists": ROWS.tolist() * 40,
    "floats": torch.zeros(RUN, 7, 8),
    "bfloat16": torch.zeros(RUN, 7, 8, dtype=torch.bfloat16),
    "float8": torch.zeros(RUN, 7, 8, dtype=torch.float8_e4m3fn),
    "bools": torch.zeros(RUN, 7, 8, dtype=torch.bool),
    "sparse": torch.tensor(ROWS).to_sparse(),
    **{str(array.dtype): array for array in (np.zeros((RUN, 7, 8)), np.array(["a"]), np.array([None]))},
    "no axes": np.array(7),
    "negative": np.where(ROWS[5, 3, 0] == ROWS, -1, ROWS),
    "of another top-k": ROWS[..., :7],
    "of other layers": ROWS[:, :4],
    "an expert twice": np.repeat(ROWS[..., ::2], 2, axis=2),
    "one row for all": np.repeat(ROWS[:1], RUN, axis=0),
    "a dense layer that isn't": np.roll(ROWS, 1, axis=1),
}


@pytest.mark.parametrize("value", SOMETHING_ELSE.values(), ids=SOMETHING_ELSE)
def test_what_are_no_rows_is_refused_with_the_sample_and_the_field(engine: Engine, value: Any) -> None:
    for missing in ("error", "native"):
        with refused(f"{engine.name} {engine.version}, request", "routed_experts", ": "):
            engine.decode(engine.put(engine.answer(ONE), value), missing=missing)


# ---- the rest


def test_the_weights_are_the_callers_or_the_answers(engine: Engine) -> None:
    answer = engine.answer(ONE)
    assert engine.decode(answer).weight_version is None
    engine.weigh(answer, "default")  # which the engine says by itself
    assert engine.decode(answer).weight_version is None
    engine.weigh(answer, "step-7")
    assert engine.decode(answer).weight_version == "step-7"
    assert engine.decode(answer, weight_version=8).weight_version == 8


def test_the_fingerprint_is_that_of_prompt_and_output(engine: Engine) -> None:
    assert engine.decode(engine.answer(ONE)).fingerprint == fingerprint(ONE.tokens)


@pytest.mark.parametrize("symptom", Symptom)
def test_no_cause_is_named_twice(engine: Engine, symptom: Symptom) -> None:
    for version in engine.releases:
        cause = engine.source(version).error(symptom, "").cause
        assert all(cause.count(words) < 2 for words in engine.causes), (version, cause)
        assert len(set(cause.split("; or "))) == len(cause.split("; or ")), (version, cause)


@pytest.mark.parametrize(
    "found",
    [
        *(None, [], [{}], "null", "[1, 2]", 7, "[" * 100_000, b"\xff\xfe\x00", "<html>502</html>", "text"),
        *({"choices": 3}, {"choices": ["a"]}, {"id": "x"}, {"error": {"message": "the model is asleep"}}),
        *(ROWS, len, [SimpleNamespace(outputs=[])], [{"choices": []}]),
    ],
    ids=lambda found: repr(found)[:20],
)
def test_what_is_no_answer_is_refused(engine: Engine, found: Any) -> None:
    with refused(engine.name, "Expected"):
        engine.decode(found, prompt=[1], output=[2])


def test_routes_of_many_requests_are_decoded_one_by_one(engine: Engine) -> None:
    answer = engine.answer(ONE)
    with refused("list of 6", "one by one"):
        engine.decode([answer] * 6)


def test_an_int_too_long_for_python_is_refused(engine: Engine) -> None:
    with refused("isn't JSON"):
        engine.decode('{"meta_info": {"prompt_tokens": ' + "9" * 10_000 + "}}")
