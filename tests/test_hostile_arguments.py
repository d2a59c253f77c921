"""Whatever a public function is given, it works or raises a ReplayError, as docs/errors.md promises.

What a file, bytes or a folder may say of itself: tests/routes/test_encoding.py.
"""

from __future__ import annotations

import itertools
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import npu_replay
from npu_replay import (
    DecoderLayers,
    ParallelLayout,
    ReplayError,
    Rollout,
    RoutedExperts,
    RoutedModel,
    TokenLayout,
    Turn,
)

SECONDS = 60


def nested(depth: int, key: str = "text_config") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {key: found}
    return found


def endless() -> SimpleNamespace:
    found = SimpleNamespace()
    found.config = found
    return found


def hostile() -> dict[str, Any]:
    """By name, since some can't be shown."""
    return {
        "None": None,
        "True": True,
        "-3": -3,
        "0": 0,
        "10**7": 10**7,
        "2**64": 2**64,
        "-2**70": -(2**70),
        "10**5000": 10**5000,
        "0.5": 0.5,
        "nan": float("nan"),
        "text": "x",
        "empty text": "",
        "NUL": "a\0b",
        "surrogate": "\ud800",
        "long text": "x" * 5000,
        "bytes": b"x",
        "object": object(),
        "class": dict,
        "[]": [],
        "[None]": [None],
        "[[]]": [[]],
        "ragged": [[1], [1, 2]],
        "fractions": [0.5, 1, 1, 1],
        "texts": ["a", "b"],
        "huge": [2**64, -(2**70)],
        "negative": [-3, 0, 1, 1],
        "True twice": [True, True],
        "{}": {},
        "deep dict": nested(1000),
        "deep list": _deep_list(1000),
        "endless": endless(),
        "no size": iter([1, 2]),
        "complex": torch.zeros(4, dtype=torch.complex64),
        "meta": torch.empty(4, dtype=torch.int64, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "nested tensor": _nested_tensor(),
        "scalar tensor": torch.tensor(3),
        "floats": torch.rand(4),
        "uint64": torch.tensor([1, 2], dtype=torch.int64).to(torch.uint64),
        "objects": np.array([object(), None], dtype=object),
        "strings": np.array(["a", "b"]),
        "dates": np.array(["2026-01-01"], dtype="datetime64[D]"),
        "records": np.zeros(3, dtype=[("a", "i4")]),
        "scalar array": np.array(7),
        "routes": routes(),
    }


def _deep_list(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.arange(2), torch.arange(3)])


def ids(tokens: int = 4) -> torch.Tensor:
    return torch.rand(tokens, 2, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices


def routes(tokens: int = 4) -> RoutedExperts:
    return RoutedExperts(ids=ids(tokens), layers=(1, 3), num_experts=8)


def _rollout() -> Rollout:
    return Rollout(MODEL)


def _layout() -> TokenLayout:
    return TokenLayout.packed([4])


MODEL = RoutedModel(layers=(1, 3), num_layers=4, num_experts=8, topk=2)
CONFIG: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "RoutedExperts": (
        RoutedExperts,
        {
            "ids": ids(),
            "layers": (1, 3),
            "num_experts": 8,
            "recorded": torch.ones(4, dtype=torch.bool),
            "fingerprint": 7,
            "weight_version": 3,
        },
    ),
    "take": (lambda rows: routes().take(rows), {"rows": [0, 1]}),
    "concat": (RoutedExperts.concat, {"parts": [routes()], "layers": (1,)}),
    "only": (lambda layers: routes().only(layers), {"layers": (1,)}),
    "layer_ids": (lambda layer: routes().layer_ids(layer), {"layer": 1}),
    "sequence": (lambda **given: routes().sequence(**given), {"first": 0, "end": 2, "fingerprint": 7}),
    "unrecorded": (RoutedExperts.unrecorded, {"tokens": 4, "layers": (1, 3), "topk": 2, "num_experts": 8}),
    "check_not_constant": (lambda tokens: routes(100).check_not_constant(tokens), {"tokens": np.arange(100)}),
    "from_bytes": (RoutedExperts.from_bytes, {"data": routes().to_bytes()}),
    "fingerprint": (npu_replay.fingerprint, {"token_ids": [1, 2]}),
    "compare": (npu_replay.compare, {"a": [routes()], "b": [routes()], "mask": None}),
    "compare log-probs": (
        npu_replay.compare,
        {"a": torch.zeros(4), "b": torch.zeros(4), "mask": torch.ones(4, dtype=torch.bool)},
    ),
    "RoutedModel": (
        RoutedModel,
        {"layers": (1, 3), "num_layers": 4, "num_experts": 8, "topk": 2, "hashed": ()},
    ),
    "from_config": (RoutedModel.from_config, {"config": CONFIG}),
    "a config": (
        lambda **keys: RoutedModel.from_config(CONFIG | keys),
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [1, 1, 1, 1],
            "mlp_only_layers": [1],
            "mlp_layer_types": None,
            "layers_block_type": None,
            "hybrid_override_pattern": None,
            "moe_layers": None,
            "decoder_sparse_step": 1,
            "first_k_dense_replace": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "num_hash_layers": 0,
            "zero_expert_num": 0,
            "intermediate_size": 1,
            "moe_intermediate_size": 1,
            "text_config": None,
            "is_moe": True,
        },
    ),
    "DecoderLayers": (
        DecoderLayers,
        {
            "count": 4,
            "moe_layer_freq": [0, 1, 1, 1],
            "first_stage": 2,
            "last_stage": 2,
            "table": [[2], [2]],
            "embedding_counts": False,
            "loss_counts": False,
        },
    ),
    "stage": (
        lambda **given: DecoderLayers(4).stage(**given),
        {"pp": 2, "vp": 1, "pp_rank": 0, "vp_rank": 0},
    ),
    "ParallelLayout": (
        lambda **given: ParallelLayout(**given).moe_layers,
        {
            "tp": 1,
            "tp_rank": 0,
            "pp": 2,
            "pp_rank": 1,
            "vp": 1,
            "cp": 1,
            "ep": 1,
            "dp": 1,
            "decoder": DecoderLayers(4),
        },
    ),
    "TokenLayout": (
        TokenLayout,
        {
            "rows": torch.arange(4),
            "lengths": (4,),
            "fingerprints": [7],
            "parallel": ParallelLayout(),
        },
    ),
    "padded": (
        TokenLayout.padded,
        {"lengths": [4], "length": 8, "side": "right", "order": "sequence", "align": 1},
    ),
    "packed": (TokenLayout.packed, {"lengths": [4], "align": 1}),
    "gather": (
        lambda **given: _layout().gather(**given),
        {"batch": [routes()], "layers": (1,), "on_bad_route": "native", "ceiling": 0.01},
    ),
    "bad_routes": (
        lambda **given: _layout().bad_routes(**given),
        {"batch": [routes()], "layers": (1,)},
    ),
    "scatter": (lambda routes: _layout().scatter(routes), {"routes": routes()}),
    "Rollout": (Rollout, {"model": MODEL, "missing": "error", "name": "a"}),
    "append": (lambda tokens: _rollout().append(tokens), {"tokens": [1]}),
    "truncate": (lambda length: _rollout().truncate(length), {"length": 1}),
    "merge": (Rollout.merge, {"samples": [_rollout()], "keep": "first"}),
    "extend": (lambda **given: _rollout().extend(**given), {"turn": None, "keep": "first"}),
    "Turn": (
        lambda **given: _rollout().extend(Turn(**given)),
        {
            "prompt": [1, 2],
            "sampled": [3, 4],
            "routes": routes(),
            "aborted": False,
            "weight_versions": [1, 1, 1, 1],
        },
    ),
}


@contextmanager
def within_seconds() -> Iterator[None]:
    """What takes minutes is as bad as a wrong exception."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done in {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def works_or_says_why(what: str, call: Callable[[], Any]) -> None:
    """In so many seconds, and in a message that can be read."""
    said = ""
    with within_seconds():
        try:
            call()
        except ReplayError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}"[:600]) from error
    assert len(said) < 20_000


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, (_, good) in CALLS.items() for argument in good]
)
@pytest.mark.filterwarnings("ignore")
def test_an_argument_of_a_wrong_kind_is_an_error_of_ours(name: str, argument: str) -> None:
    call, good = CALLS[name]
    for kind, value in hostile().items():
        given = good | {argument: value}
        works_or_says_why(f"{name}({argument}={kind})", lambda given=given: call(**given))  # type: ignore[misc]


def test_a_model_of_more_layers_than_any_has_is_refused_at_once() -> None:
    many = 10**7
    for build in (
        lambda: RoutedModel.from_config(CONFIG | {"num_hidden_layers": many}),
        lambda: RoutedModel(layers=range(many), num_layers=many, num_experts=8, topk=2),
        lambda: RoutedModel(layers=(1,), num_layers=many, num_experts=8, topk=2),
        lambda: RoutedModel(layers=(1,), num_layers=4, num_experts=many, topk=many // 2),
        lambda: RoutedModel(layers=itertools.count(), num_layers=4, num_experts=8, topk=2),
        lambda: RoutedModel.from_config(CONFIG | {"mlp_layer_types": ["sparse"] * many}),
        lambda: DecoderLayers(many),
        lambda: DecoderLayers(4, itertools.count()),
        lambda: DecoderLayers(4, table=itertools.repeat([1])),
    ):
        with within_seconds(), pytest.raises(ReplayError):
            build()


@pytest.mark.parametrize("freq", [[0.5, 1, 1, 1], [-3, 1, 1, 1], [2, 1, 1, 1], ["1", 1, 1, 1], [None] * 4])
def test_a_list_of_moe_layers_holds_0_and_1_only(freq: list[Any]) -> None:
    with pytest.raises(ReplayError, match="moe_layer_freq"):
        DecoderLayers(4, freq)
    assert DecoderLayers(4, [False, True, np.int64(1), torch.tensor(0)]).moe == (1, 2)
