"""What an engine hands over becomes routes, or an error that says what is wrong, where and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from choice import examples
from npu_replay import RoutedExperts, fingerprint
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.admit import admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import Fault, Source, Symptom
from npu_replay.routes import checks
from npu_replay.routes.checks import Array

DTYPES = ["u1", "u2", "i2", "i4", "i8", "u8", ">i4", ">u2"]

# A dense layer before and one between; a row holds 40 bits a layer, so rows can be told from each other.
MODEL = RoutedModel(layers=(1, 2, 4, 5), num_layers=6, num_experts=128, topk=8)
TOKENS = 150
FAULTS = tuple(
    Fault(symptom=symptom, since=since, until=until, cause=f"{symptom.value} as in {since}")
    for since, until in (("0.2.0", "0.4.0"), ("0.4.0", ""))
    for symptom in Symptom
)


def chosen(rows: int, columns: int, model: RoutedModel = MODEL, seed: int = 0) -> Array:
    """Random ids, no expert twice; [rows, columns, topk] int64."""
    scores = np.random.default_rng(seed).random((rows, columns, model.num_experts))
    return np.argsort(scores, axis=2)[..., : model.topk]


def whole(rows: Array, model: RoutedModel = MODEL) -> Array:
    """With the columns of all decoder layers, zeros where they are dense."""
    wide = np.zeros((len(rows), model.num_layers, rows.shape[2]), rows.dtype)
    wide[:, list(model.layers)] = rows
    return wide


def words(count: int = TOKENS) -> Array:
    return np.random.default_rng(count).permutation(1000)[:count]


def source(version: str = "0.3.1") -> Source:
    return Source(
        engine="Engine",
        version=version,
        sample="request 17, completion 2",
        field="choices[0].rows",
        faults=FAULTS,
    )


def taken(rows: Any, **changes: Any) -> RoutedExperts:
    return admit(rows, **({"model": MODEL, "tokens": words(), "source": source()} | changes))


# What is right comes through


def test_a_row_of_zeros_is_expert_0_where_there_is_one_expert_a_token() -> None:
    model = RoutedModel(layers=(0, 1), num_layers=2, num_experts=16, topk=1)
    rows = np.random.default_rng(0).integers(0, 16, (TOKENS - 1, 2, 1))
    rows[7] = 0
    assert taken(rows, model=model).recorded[:-1].all()


def test_a_row_of_zeros_in_many_layers_was_never_written_whatever_the_top_k() -> None:
    """Llama 4 has one expert a token, of 16 in 48 layers."""
    model = RoutedModel(layers=tuple(range(48)), num_layers=48, num_experts=16, topk=1)
    rows = np.random.default_rng(0).integers(0, 16, (TOKENS - 1, 48, 1))
    rows[7] = 0
    with pytest.raises(InvalidRoutes, match=r"1 of 149 rows are zeros in all layers.*row 7"):
        taken(rows, model=model)
    assert not taken(rows, model=model, missing="native").recorded[7]
    with pytest.raises(InvalidRoutes, match="all 149 rows are zeros"):
        taken(np.zeros_like(rows), model=model)


FILLS = {"zeros": [0] * 8, "-1": [-1] * 8, "consecutive ids": [*range(8)]}
ELSEWHERE = (np.arange(8) + np.arange(0, 600, 150).reshape(4, 1) + 125) % 128


@pytest.mark.parametrize("columns", ["all layers", "MoE layers"])
@pytest.mark.parametrize("what", FILLS)
def test_rows_that_stand_for_none_are_left_out_or_refused_by_what_they_hold(what: str, columns: str) -> None:
    """In the dense layers, too; TensorRT-LLM's lost rows are -1, and frameworks pad with 0 to k - 1."""
    rows = chosen(TOKENS - 1, 4)
    array = (whole(rows) if columns == "all layers" else rows).astype(np.int32)
    array[[7, 30]] = FILLS[what]
    routes = taken(array, missing="native")
    assert np.flatnonzero(~routes.recorded.numpy()).tolist() == [7, 30, TOKENS - 1]
    assert not routes.ids[[7, 30]].any()
    assert torch.equal(routes.ids[:7].long(), torch.from_numpy(rows[:7]))
    words = rf"2 of 149 rows are {what} in all layers.*row 7, the last in row 30.*Usual cause: zero rows"
    with pytest.raises(InvalidRoutes, match=words):
        taken(array)
    array[:] = FILLS[what]
    with pytest.raises(InvalidRoutes, match=f"all 149 rows are {what}"):
        taken(array, missing="native")


def test_padding_begins_anywhere_and_a_part_of_a_row_is_none() -> None:
    rows = chosen(TOKENS - 1, 4).astype(np.int16)
    rows[9] = ELSEWHERE  # 125, 126, 127, 0, 1 and so on, another start in each layer
    assert not taken(rows, missing="native").recorded[9]
    rows[9, 1, 7] = (rows[9, 1, 7] + 1) % 128
    rows[11, :3] = ELSEWHERE[:3]
    rows[12, 3] = range(8)
    assert taken(rows).recorded[:-1].all()
    rows[9, 0, 0] = -1  # one id is no row
    with pytest.raises(InvalidRoutes, match="an id is out of range, the first in row 9"):
        taken(rows, missing="native")


def test_layers_that_look_experts_up_by_token_are_left_out_t22() -> None:
    """An engine reports ids for them (vLLM) or zeros (SGLang); columns go by label, not by their order."""
    model = RoutedModel(layers=(2, 4), num_layers=5, num_experts=128, topk=8, hashed=(1, 3))
    rows = chosen(TOKENS - 1, 4)  # of the layers 1 to 4
    wide = np.zeros((TOKENS - 1, 5, 8), np.uint8)
    wide[:, 1:] = rows
    routes = taken(wide, model=model)
    assert routes.layers == (2, 4)
    assert torch.equal(routes.ids[:-1].long(), torch.from_numpy(rows[:, [1, 3]]))
    assert taken(rows, model=model) == routes
    wide[:, [1, 3]] = 0
    assert taken(wide, model=model) == routes
    wide[9, 0, 2] = 1
    with pytest.raises(InvalidRoutes, match="layer 0: a dense layer has experts"):
        taken(wide, model=model)
    with pytest.raises(InvalidRoutes, match="Expected 5, or 4, got 2"):
        taken(rows[:, [1, 3]], model=model)


# Rightly alike: these aren't faults


@pytest.mark.parametrize("tokens", [5, 20, TOKENS])
def test_the_first_rows_of_a_sequence_may_be_alike_in_all_layers(tokens: int) -> None:
    """The first two were, in all of a live Mixtral's 24 layers, and transformers agrees."""
    model = RoutedModel(layers=tuple(range(24)), num_layers=24, num_experts=8, topk=2)
    rows = chosen(tokens - 1, 24, model)
    rows[:4] = rows[0]
    assert taken(rows, model=model, tokens=words(tokens)).recorded[:-1].all()


def test_copies_are_a_fault_where_there_are_96_bits_of_choice() -> None:
    for layers in (2, 3):
        model = RoutedModel(layers=tuple(range(layers)), num_layers=layers, num_experts=128, topk=8)
        rows = chosen(TOKENS - 1, layers, model)
        rows[100:] = rows[:49]
        if layers == 2:
            assert taken(rows, model=model).recorded[:-1].all()
    with pytest.raises(InvalidRoutes, match="49 rows are another token's"):
        taken(rows, model=model)


def test_a_model_that_uses_every_expert_chooses_alike_always() -> None:
    model = RoutedModel(layers=(0, 1), num_layers=2, num_experts=2, topk=2)
    rows = np.broadcast_to(np.array([0, 1], np.uint8), (TOKENS - 1, 2, 2))
    assert taken(rows, model=model).recorded[:-1].all()


# Each way of being wrong, and what is said of it


@dataclass(frozen=True)
class Wrong:
    """Rows that are wrong in one way, and what the error has to say."""

    symptom: Symptom
    says: str
    rows: Callable[[Array], Any]
    changes: dict[str, Any] = field(default_factory=dict)


def changed(at: Any, value: Any, start: int = 0) -> Callable[[Array], Array]:
    def change(rows: Array) -> Array:
        rows[at] = value
        return rows[start:]

    return change


# The rows are [149, 6, 8]: dense layers 0 and 3 are zeros.
# fmt: off
WRONG: dict[str, Wrong] = {
    "fractions": Wrong(Symptom.SHAPE, r"of float64, \[149, 6, 8\]", lambda rows: rows.astype(float)),
    "flat": Wrong(Symptom.SHAPE, r"got ndarray of int64, \[149, 48\]", lambda rows: rows.reshape(149, 48)),
    "a list": Wrong(Symptom.SHAPE, r"got \[\[\[0, 0", lambda rows: rows.tolist()),
    "a start after the end": Wrong(Symptom.SHAPE, "0 to 150, got 151", lambda rows: rows[:0], {"start": 151}),
    "a start before 0": Wrong(Symptom.SHAPE, "0 to 150, got -1", lambda rows: rows, {"start": -1}),
    "a row missing": Wrong(Symptom.TOO_FEW_ROWS, r"Expected 149 rows \(150 tokens from 0 on.*got 148",
        lambda rows: rows[:-1]),
    "a row for the last token": Wrong(Symptom.TOO_MANY_ROWS, r"Expected 149 rows .*got 150",
        lambda rows: np.concatenate([rows, rows[:1]])),
    "the prompt's rows too": Wrong(Symptom.TOO_MANY_ROWS,
        r"Expected 109 rows \(150 tokens from 40 on.*got 149", lambda rows: rows, {"start": 40}),
    "too many of an aborted": Wrong(Symptom.TOO_MANY_ROWS, "got 298",
        lambda rows: np.concatenate([rows, rows]), {"ended": False}),
    "a row past a stop string's": Wrong(Symptom.TOO_MANY_ROWS, "more tokens", lambda rows: rows,
        {"start": 6, "surplus": 5}),
    "a row missing before a stop string's": Wrong(Symptom.TOO_FEW_ROWS, "fewer tokens",
        lambda rows: rows, {"surplus": 4}),
    "another top-k": Wrong(Symptom.TOPK, "Expected 8 ids, got 6", lambda rows: rows[..., :6]),
    "layers missing": Wrong(Symptom.COLUMNS, "Expected 6, or 4, got 5", lambda rows: rows[:, :5]),
    "columns shifted": Wrong(Symptom.DENSE_COLUMN,
        r"layer 0: a dense layer has experts.*got \[\d+.*\] in row 0",
        lambda rows: np.roll(rows, -1, axis=1)),
    "an id in a dense layer": Wrong(Symptom.DENSE_COLUMN,
        r"layer 3: .*got \[0, 0, 7, 0, 0, 0, 0, 0\] in row 77",
        changed((77, 3, 2), 7, 60), {"start": 60}),
    "an id in a dense layer of the first row": Wrong(Symptom.DENSE_COLUMN, "layer 0: .*in row 0",
        changed((0, 0, 7), 1)),
    "an id too high in the first row of a few": Wrong(Symptom.RANGE, "layer 1: .*first in row 140.*got 128",
        changed((140, 1, 0), 128, 140), {"start": 140}),
    "an id too high": Wrong(Symptom.RANGE,
        "layer 4: an id is out of range, the first in row 66.*0 to 127, got 261",
        changed((66, 4, 7), 261, 40), {"start": 40}),
    "an id below 0": Wrong(Symptom.RANGE, "layer 5: .*row 148.*got -1", changed((148, 5, 0), -1)),
    "all zeros": Wrong(Symptom.ZEROS, "all 149 rows are zeros.*got nothing", lambda rows: rows * 0),
    "a cached prefix of zeros": Wrong(Symptom.ZERO_ROWS, "38 of 139 .*first in row 10, the last in row 47",
        changed(slice(48), 0, 10), {"start": 10}),
    "a layer never captured": Wrong(Symptom.CONSTANT_LAYER,
        r"layer 4: all 149 recorded rows are the same \(in 1 of the layers\).*got \[0, 0, 0, 0, 0, 0, 0, 0\]",
        changed((slice(None), 4), 0)),
    "two layers of one row": Wrong(Symptom.CONSTANT_LAYER,
        r"layer 2: .*\(in 2 of the layers\).*got \[0, 1, 2, 3, 4, 5, 6, 7\]",
        changed((slice(None), [2, 5]), np.arange(8))),
    "one row in all layers": Wrong(Symptom.CONSTANT_LAYER,
        r"layer 1: .*\(in 4 of the layers\).*got \[3, 4, 5, 6, 7, 8, 9, 10\]",
        changed((slice(None), [1, 2, 4, 5]), np.arange(3, 11))),
    "an expert twice": Wrong(Symptom.DUPLICATES,
        "layer 5: 1 token-layers name an expert twice, the first in row 100",
        lambda rows: changed((100, 5, 7), rows[100, 5, 0], 7)(rows), {"start": 7}),
    "a layer of zeros in one row": Wrong(Symptom.DUPLICATES,
        r"layer 2: 3 token-layers .*row 8.*got \[0, 0, 0, 0, 0, 0, 0, 0\]", changed(([8, 9, 10], 2), 0)),
    "a row repeated at a chunk's end": Wrong(Symptom.STALE_ROWS,
        f"8 rows are another token's in all layers, the first is row 64.*for token {words()[64]}",
        lambda rows: changed(slice(64, 72), rows[63])(rows)),
    "rows of another request": Wrong(Symptom.STALE_ROWS, "49 rows are",
        lambda rows: changed(slice(100, 149), rows[:49])(rows)),
    "tokens that are fractions": Wrong(Symptom.UNREADABLE, "token ids", lambda rows: rows,
        {"tokens": words() * 1.0}),
    "no tokens": Wrong(Symptom.UNREADABLE, "token ids.*got None", lambda rows: rows, {"tokens": None}),
}
# fmt: on


@pytest.mark.parametrize("case", WRONG)
def test_the_error_names_engine_sample_field_and_place_t1_t31_t32(case: str) -> None:
    wrong = WRONG[case]
    with pytest.raises(InvalidRoutes, match=wrong.says) as caught:
        taken(wrong.rows(whole(chosen(TOKENS - 1, 4))), **wrong.changes)
    message = str(caught.value)
    assert message.startswith("[npu_replay] Engine 0.3.1, request 17, completion 2, choices[0].rows")
    assert message.count("Expected ") == 1
    assert caught.value.cause == f"{wrong.symptom.value} as in 0.2.0"


def test_copies_are_found_beside_rows_without_a_route_t31(caplog: pytest.LogCaptureFixture) -> None:
    rows = chosen(TOKENS - 1, 4)
    tokens = words()
    blank = [3, *range(20, 30), 90]
    rows[blank] = 0
    tokens[100:120] = tokens[99]  # one token, said again and again
    rows[100:120] = rows[99]
    with caplog.at_level("WARNING"):
        assert int(taken(rows, tokens=tokens, missing="native").recorded.sum()) == TOKENS - 1 - 12
    assert not caplog.records, "rows of zeros are nobody's copies"
    rows[60:67] = rows[59]  # a twentieth of the rows that have a route, not of all
    later = np.concatenate([np.arange(2000, 2010), tokens])
    routes = taken(rows, tokens=later, start=10, missing="native")
    left = [3, *range(20, 30), *range(60, 67), 90, TOKENS - 1]
    assert (~routes.recorded[10:]).nonzero()[:, 0].tolist() == left
    assert not routes.ids[70:77].any()
    rows[blank] = chosen(12, 4, seed=77)
    rows[67] = rows[59]
    with pytest.raises(InvalidRoutes, match=f"8 rows are .* row 70.*for token {tokens[60]}"):
        taken(rows, tokens=later, start=10)


# Against a slow truth


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[RoutedModel, Array, Array, dict[str, Any], int]:
    """A model, the tokens, good rows of its MoE layers, how they are handed over, and a seed."""
    layers = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True).map(sorted))
    topk = draw(st.integers(1, 16))
    experts = draw(st.sampled_from([topk + 1, topk + 40, 300]))
    model = RoutedModel(
        layers=tuple(layers), num_layers=draw(st.integers(layers[-1] + 1, 9)), num_experts=experts, topk=topk
    )
    tokens = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 2**31, draw(st.integers(0, 90)))
    start = draw(st.integers(0, len(tokens)))
    ended = draw(st.booleans())
    surplus = draw(st.sampled_from([0, 0, 3]))
    count = max(0, len(tokens) - 1 - start + surplus) if ended or draw(st.booleans()) else 0
    seed = draw(st.integers(0, 2**32))
    rows = chosen(count, len(layers), model, seed)
    return model, tokens, rows, {"start": start, "ended": ended, "surplus": surplus}, seed


@examples(200)
@given(rollout=rollouts(), columns=st.booleans(), dtype=st.sampled_from(DTYPES), data=st.data())
def test_good_rows_come_through_as_they_are_and_their_own_checks_take_them(
    rollout: tuple[RoutedModel, Array, Array, dict[str, Any], int],
    columns: bool,
    dtype: str,
    data: st.DataObject,
) -> None:
    model, tokens, rows, how, seed = rollout
    assume(model.num_experts <= np.iinfo(dtype).max + 1)
    blank = data.draw(st.sets(st.integers(0, max(0, len(rows) - 1)), max_size=3)) if model.topk > 1 else set()
    ran = max(0, len(tokens) - 1 - how["start"])  # the rest is surplus
    blank = {row for row in blank if row < len(rows)}
    assume(not blank.issuperset(range(min(ran, len(rows)))) or not blank)
    rows[list(blank)] = 0
    given_ = (whole(rows, model) if columns else rows).astype(dtype)
    given_ = np.asfortranarray(given_) if seed % 2 else given_
    routes = admit(given_, model=model, tokens=tokens, source=source(), missing="native", **how)
    nothing = np.zeros((len(model.layers), model.topk)).tolist()
    for token in range(len(tokens)):
        row = token - how["start"]
        has_run = token < len(tokens) - 1 or how["surplus"] > 0
        there = 0 <= row < len(rows) and row not in blank and has_run
        assert bool(routes.recorded[token]) == there
        assert routes.ids[token].tolist() == (rows[row].tolist() if there else nothing)
    again = RoutedExperts(
        ids=routes.ids,
        layers=model.layers,
        num_experts=model.num_experts,
        recorded=routes.recorded,
        fingerprint=fingerprint(tokens),
    )
    assert again == routes
    assert again.ids.dtype == routes.ids.dtype


# What it lets in can be saved, sent and read again


def test_a_constant_layer_that_the_tokens_explain_is_read_again() -> None:
    """Two tokens in turn, a thousand times, choose alike in a layer. Every other way: test_handed_on.py."""
    rows = chosen(2, 4)
    rows[:, 2] = np.arange(8)
    routes = taken(np.tile(rows, (500, 1, 1))[:-1], tokens=np.tile([5, 9], 500))
    assert RoutedExperts.from_bytes(routes.to_bytes()) == routes


# A router that is dead beside live ones


@pytest.mark.parametrize("columns", [[2], [0, 1, 3]])
def test_a_dead_router_beside_live_ones_is_let_in_with_one_warning_that_names_it(
    caplog: pytest.LogCaptureFixture, columns: list[int]
) -> None:
    checks._warn_of_dead_routers.cache_clear()
    for dead in (columns, columns, [1]):  # the last is another set of layers
        rows = chosen(TOKENS - 1, 4)
        rows[:, dead] = np.arange(3, 11)
        routes = taken(rows)
        assert routes.recorded[:-1].all()
        alone = routes.only([MODEL.layers[dead[0]]])  # a pipeline stage may hold no other
        assert RoutedExperts.from_bytes(alone.to_bytes()) == alone
    warned = [record.getMessage() for record in caplog.records if "same experts" in record.getMessage()]
    assert len(warned) == 2
    assert f"layer {', '.join(str(MODEL.layers[column]) for column in columns)} sends all" in warned[0]
