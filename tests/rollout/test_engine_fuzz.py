"""No answer of an engine makes a decoder crash, hang, or return routes that its own checks refuse."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import sglang_outputs
import vllm_outputs
from choice import examples
from npu_replay import RoutedExperts, fingerprint
from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import ReplayError
from npu_replay.rollout.admit import admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import Source

pytestmark = pytest.mark.timeout(120)

MODEL = RoutedModel(layers=(1, 2), num_layers=3, num_experts=12, topk=2)
SOURCE = Source(engine="Engine")
QUIET = examples(300, without=HealthCheck)
VLLM = ("0.14.0", "0.15.1", "0.20.2", "0.21.0", "0.22.0", "0.30.0", "0.33.0")

# Junk, from anywhere

NUMBERS = st.sampled_from(
    [0, 1, -1, 7, 255, 256, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, float("nan"), True]
)
TEXTS = st.sampled_from(["", "A", "AAAA", "AAA=", "null", "abort", "stop", "length", "0.5.12", "é", "\udc80"])
LEAVES = st.none() | NUMBERS | TEXTS | st.text(max_size=8) | st.binary(max_size=12)
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.tuples(inner)
    ),
    max_leaves=8,
)
DTYPES = st.sampled_from(
    ["u1", "i1", "u2", "i2", ">i4", "i4", "i8", "u8", "f4", "?", "O", "U2", "c8", "M8[s]"]
)


def arrays() -> st.SearchStrategy[Any]:
    shapes = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
    return st.builds(
        lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 12, shape).astype(dtype),
        DTYPES,
        shapes,
        st.integers(0, 99),
    )


@st.composite
def broken_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """Good bytes with some flipped, cut off, doubled, or put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = at + draw(st.integers(0, 9))
        kind = draw(st.sampled_from(["flip", "cut", "drop", "double", "insert"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind in ("cut", "drop"):
            del data[at : None if kind == "cut" else end]
        else:
            data[at:at] = data[at:end] if kind == "double" else draw(st.binary(max_size=9))
    return bytes(data)


@st.composite
def broken_text(draw: st.DrawFn, good: str) -> str | bytes:
    """Base64 whose text was broken, or what it stands for."""
    means = b""
    with contextlib.suppress(ValueError):  # it was broken before
        means = base64.b64decode(good)
    if means and draw(st.booleans()):
        text = base64.b64encode(draw(broken_bytes(means)))
    else:
        text = draw(broken_bytes(good.encode()))
    return text if draw(st.integers(0, 3)) == 0 else text.decode("latin-1")


@st.composite
def broken(draw: st.DrawFn, good: Any) -> Any:
    """An answer, dicts and lists in one another, that is wrong in some places."""
    answer = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        answer = _broken_once(draw, answer)
    return answer


def _broken_once(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value, key=str)))
        value[key] = _broken_once(draw, value[key])
        return value
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(value) - 1))
        value[at] = _broken_once(draw, value[at])
        return value
    if isinstance(value, list) and draw(st.booleans()):
        return draw(st.sampled_from([value[:-1], value + value[:1], value[::-1], [value], tuple(value)]))
    if isinstance(value, dict) and value and draw(st.booleans()):
        value.pop(draw(st.sampled_from(sorted(value, key=str))))
        return value
    if isinstance(value, str) and len(value) > 20 and draw(st.integers(0, 3)):
        return draw(broken_text(value))
    if isinstance(value, int) and draw(st.booleans()):
        return value + draw(st.sampled_from([-1, 1, 12, 1000]))
    return draw(JUNK | arrays())


# What has to hold


def survives(decode: Callable[[], list[RoutedExperts] | RoutedExperts]) -> list[RoutedExperts]:
    """What it returned, or nothing where it refused; anything else is a crash."""
    said = ""
    try:
        found = decode()
    except ReplayError as error:
        found = []
        said = str(error)
    assert len(said) < 4000
    return found if isinstance(found, list) else [found]


def stands(
    routes: RoutedExperts, tokens: Any = None, model: RoutedModel = MODEL, *, cut: bool = False
) -> None:
    """These are routes that all checks take: its own, and those of `admit`. Where tokens may have been cut
    off the end, the last one left may have a row."""
    fields = ("ids", "layers", "num_experts", "recorded", "fingerprint", "weight_version")
    assert RoutedExperts(**{name: getattr(routes, name) for name in fields}) == routes
    assert (routes.layers, routes.topk, routes.num_experts) == (model.layers, model.topk, model.num_experts)
    assert RoutedExperts.from_bytes(routes.to_bytes()) == routes
    assert cut or not len(routes) or not bool(routes.recorded[-1])
    if tokens is not None:
        assert routes.fingerprint == fingerprint(tokens)
        assert len(routes) == len(tokens)
        if not bool(routes.recorded.any()):  # zeros alone are refused
            return
        rows = routes.ids.numpy()[: max(0, len(routes) - 1)]
        seen = admit(rows, model=model, tokens=tokens, source=SOURCE, missing="native")
        assert bool((seen.recorded == routes.recorded).all())


# The core's


# The engines'


def as_object(answer: Any) -> Any:
    """A dict as an object with attributes, as OpenAI's client and vLLM give them."""
    if isinstance(answer, dict):
        return types.SimpleNamespace(**{str(key): value for key, value in answer.items()})
    return answer


@QUIET
@given(data=st.data(), version=st.sampled_from(VLLM), seed=st.integers(0, 9), how=st.booleans())
def test_a_broken_answer_of_vllm_is_taken_or_refused(
    data: st.DataObject, version: str, seed: int, how: bool
) -> None:
    one = vllm_outputs.sampled(MODEL, prompt=5, output=4, seed=seed)
    start = data.draw(st.sampled_from([0, 0, 3]))
    endpoint = data.draw(st.sampled_from(["completions", "chat", "generate", "in-process"]))
    start = start if version > "0.21" else 0
    if endpoint == "in-process":
        request = vllm_outputs.request_output(version, MODEL, one, one, start=start)
        bad = data.draw(broken({**vars(request), "outputs": [dict(vars(out)) for out in request.outputs]}))
        if isinstance(bad, dict) and isinstance(bad.get("outputs"), list):
            bad["outputs"] = [as_object(output) for output in bad["outputs"]]
        bad = as_object(bad)
    else:
        bad = data.draw(broken(vllm_outputs.answer(version, MODEL, one, one, endpoint=endpoint, start=start)))
    if endpoint != "in-process" and data.draw(st.booleans()):
        with contextlib.suppress(TypeError, ValueError):
            bad = json.dumps(bad).encode()[: data.draw(st.sampled_from([None, None, 50, -1]))]
    given_ = {
        "prompt_token_ids": data.draw(st.none() | st.just(one.prompt) | JUNK),
        "output_token_ids": data.draw(st.none() | st.just([one.output] * 2) | JUNK),
        "start": start,
        "version": version if how else None,
        "missing": data.draw(st.sampled_from(["error", "native"])),
    }
    for routes in survives(lambda: from_vllm(bad, MODEL, **given_)):
        stands(routes, cut=True)  # a broken answer may say less, or more, of its tokens


@QUIET
@given(data=st.data(), version=st.sampled_from(sglang_outputs.RELEASES), how=st.booleans())
def test_a_broken_answer_of_sglang_is_taken_or_refused(data: st.DataObject, version: str, how: bool) -> None:
    tokens = np.random.default_rng(1).permutation(500)[:9].tolist()
    request = sglang_outputs.Request(
        version=version,
        prompt=tokens[:5],
        output=tokens[5:],
        rows=sglang_outputs.true_rows(MODEL, 8),
        asked_from=data.draw(st.sampled_from([0, 0, 3])),
        finish=data.draw(st.sampled_from(["stop", "length", "abort"])),
        retractions=data.draw(st.sampled_from([0, 0, 1])),
    )
    forms = [request.meta_info(), request.generate(), request.generate(skip_tokenizer_init=True)]
    forms += [request.openai(), request.openai(token_ids=True, meta_info=True)]
    bad = data.draw(broken(data.draw(st.sampled_from(forms))))
    if data.draw(st.booleans()):
        with contextlib.suppress(TypeError, ValueError):
            bad = json.dumps(bad)[: data.draw(st.sampled_from([None, None, 50, -1]))]
    given_ = {
        "prompt_token_ids": data.draw(st.just(request.prompt) | st.none() | JUNK),
        "output_ids": data.draw(st.just(request.output) | st.none() | JUNK),
        "start_len": request.asked_from,
        "version": version if how else None,
        "missing": data.draw(st.sampled_from(["error", "native"])),
    }
    for routes in survives(lambda: from_sglang(bad, MODEL, **given_)):
        stands(routes, cut=True)  # a broken answer may say less, or more, of its tokens
